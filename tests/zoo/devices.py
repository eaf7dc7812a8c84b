"""Wraps every model on a device: in each precision, model and sample on either device, at depths 1 and 2.

Each worker is a pair of processes, the two ranks of a pipeline. A model is captured once per process and
precision. What a worker does not finish counts as a failure of its model, and the worker is replaced.
"""

import dataclasses
import math
import multiprocessing as mp
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.ports import free_port
from tests.tasks import RememberingSource, remembering
from tests.zoo.tours import case_of, cases
from tests.zoo.trial import Case, batch_of, default_dtype, made
from varuna import Varuna, plain_randomness
from varuna.capture.model.call_convention import StructuredCall
from varuna.capture.trace.trace import autocast, without_kv_cache
from varuna.errors import CaptureError
from varuna.types import PrecisionName

SEED = 5
SIZE = 7  # samples; no model has a dimension of this size
PATIENCE_SECONDS = 300.0
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
GRADIENT_TOLERANCE = {"fp32": 1e-2, "bf16": 0.3, "fp16": 0.3}
OK = "ok"

LossAndGradients = tuple[float, dict[str, Tensor]]


class Tour(NamedTuple):
    """What to run: on which device, in which precisions, at which depths."""

    device: str
    precisions: Sequence[PrecisionName] = ("fp32", "bf16")
    depths: Sequence[int] = (1, 2)

    @property
    def placements(self) -> list[tuple[str, str]]:
        """Devices of the model and of the sample."""
        places = dict.fromkeys(("cpu", self.device))
        return [(model, sample) for model in places for sample in places]

    @property
    def columns(self) -> list[str]:
        titles = {"cpu": "cpu", self.device: self.device.split(":")[0]}
        single = [f"{titles[model]}/{titles[sample]}" for model, sample in self.placements]
        return [*(single if 1 in self.depths else ()), *(["P=2"] if 2 in self.depths else ())]


class WithLoss(nn.Module):
    """A model that is called by the leaves of its arguments and returns its loss."""

    def __init__(self, case: Case, convention: StructuredCall) -> None:
        super().__init__()
        self.model = made(case)

        def call(model: nn.Module, leaves: Mapping[str, Any]) -> Tensor:  # a function: it is never copied
            nested = pytree.tree_unflatten([leaves[name] for name in convention.names], convention._spec)
            return case.loss(model(**nested))

        self._call = call

    def forward(self, **leaves: Any) -> Tensor:
        return self._call(self.model, leaves)


def on(device: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in inputs.items()}


class Trial:
    """One model in one precision, in one process."""

    def __init__(self, name: str, precision: PrecisionName, device: str) -> None:
        self.case = dataclasses.replace(case_of(name), dtype=torch.float32)
        self.name, self.precision, self.device = name, precision, device
        args, kwargs = batch_of(self.case, 0, SIZE)
        self.convention, self.inputs = StructuredCall.of(made(self.case), args, kwargs, grad_enabled=True)
        dims = self.case.options.get("batch_dims", {})
        batched = {name: dims.get(name, 0) for name, v in self.inputs.items() if isinstance(v, Tensor)}
        self.dims = {
            name: dim if dim is None or self.inputs[name].shape[dim] == SIZE else None
            for name, dim in batched.items()
            if self.inputs[name].dim()
        }

    def plain(self) -> LossAndGradients:
        model = WithLoss(self.case, self.convention).to(self.device)
        draws = plain_randomness(seed=SEED, step=0, batch_size=SIZE)
        with without_kv_cache(model), draws, autocast(self.precision, torch.device(self.device)):
            loss = model(**on(self.device, self.inputs))
        if loss.requires_grad:
            loss.backward()
        return float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def wrapped(self, depth: int, model_at: str, sample_at: str) -> LossAndGradients:
        inputs = on(sample_at, self.inputs)
        with remembering(self.name):
            wrapped = Varuna(
                WithLoss(self.case, self.convention).to(model_at),
                "".join(f"{rank};" for rank in range(depth)),
                inputs,
                SIZE,
                SIZE,
                device=self.device,
                precision=self.precision,
                batch_dims=self.dims,
                seed=SEED,
                from_cache=False,
                timeout_seconds=60.0,
            )
            try:
                wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.0), loss_scale=1.0)
                loss, _ = wrapped.step(inputs)
                return loss, {n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None}
            finally:
                wrapped.close()

    def compare(
        self, found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]
    ) -> str:
        loss = abs(found[0] - expected[0]) / (abs(expected[0]) + 1e-6)
        if not loss <= LOSS_TOLERANCE[self.precision]:
            return f"wrong: the loss differs by {loss:.1e}"
        apart, rounding = distance(found[1], expected[1]), 0.0
        if apart > GRADIENT_TOLERANCE[self.precision] and self.precision != "fp32":
            single = Trial(self.name, "fp32", self.device).plain()[1]
            rounding = distance({name: single[name] for name in found[1] if name in single}, expected[1])
        if not apart <= max(GRADIENT_TOLERANCE[self.precision], rounding):
            fp32 = f", those of the plain model in fp32 by {rounding:.1e}" if rounding else ""
            return f"wrong: the gradients differ by {apart:.1e}{fp32}"
        return f"{OK}: the loss differs by {loss:.1e}, the gradients by {apart:.1e}"


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of gradients, relative to the norm of the expected ones."""
    differences, norms = [0.0], [1e-12]
    for name, grad in found.items():
        other = expected.get(name, torch.zeros_like(grad))
        differences.append(float((grad - other).float().norm()))
        norms.append(float(other.float().norm()))
    return float(torch.tensor(differences).norm() / torch.tensor(norms).norm())


def is_ok(said: str) -> bool:
    return said.partition(":")[0] == OK


def say(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, CaptureError):
        checked = "differs from the model itself" in text or "when it is called again" in text
        return f"{'refused by the check' if checked else 'not captured'}: {text}"
    if isinstance(error, ValueError) and "the model has 0 cuts" in text:
        return f"not captured: {text}"
    return f"error: {type(error).__name__}: {text}"


@contextmanager
def ranks(rank: int, world: int, port: int) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def visit(name: str, tour: Tour, rank: int, ports: Sequence[int]) -> dict[PrecisionName, list[str]]:
    """Return the results of one model by precision, one for each column; rank 1 takes part at depth 2."""
    found: dict[PrecisionName, list[str]] = {}
    RememberingSource.remembered.clear()
    for precision, port in zip(tour.precisions, ports, strict=True):
        try:
            trial = Trial(name, precision, tour.device)
            expected = trial.plain()
            if not math.isfinite(expected[0]):
                raise FloatingPointError(f"its loss is {expected[0]}")
        except Exception as error:
            found[precision] = [f"error of the plain model: {say(error)}"] * len(tour.columns)
            continue
        said: list[str] = []
        for model_at, sample_at in tour.placements if rank == 0 and 1 in tour.depths else ():
            try:
                with ranks(0, 1, free_port()):
                    said.append(trial.compare(trial.wrapped(1, model_at, sample_at), expected))
            except Exception as error:
                said.append(say(error))
        if 2 in tour.depths:
            try:
                with ranks(rank, 2, port):
                    said.append(trial.compare(trial.wrapped(2, "cpu", "cpu"), expected))
            except Exception as error:
                said.append(say(error))
        found[precision] = said
    return found


def serve(connection: Connection, tour: Tour, rank: int) -> None:
    """Run models as one rank of a worker until the connection closes."""
    torch.set_num_threads(1)
    if tour.device.startswith("cuda"):
        torch.cuda.set_device(torch.device(tour.device))
    with default_dtype(torch.float32):
        while True:
            try:
                name, ports = connection.recv()
            except EOFError:
                return
            connection.send(visit(name, tour, rank, ports))


class Worker:
    """Two processes that run one model after another."""

    def __init__(self, tour: Tour) -> None:
        self._tour = tour
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, name: str) -> dict[PrecisionName, list[str]]:
        if not self._processes:
            self._start()
        ports = [free_port() for _ in self._tour.precisions]
        try:
            for connection in self._connections:
                connection.send((name, ports))
            deadline = time.monotonic() + PATIENCE_SECONDS
            answers = []
            for connection in self._connections:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError(f"no answer in {PATIENCE_SECONDS:.0f} s")
                answers.append(connection.recv())
            return _both(*answers)
        except (EOFError, OSError) as error:
            self.stop()
            said = f"error: the process died ({error})"
            return {precision: [said] * len(self._tour.columns) for precision in self._tour.precisions}

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(max(self._tour.depths)):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._tour, rank), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []


def _both(
    first: dict[PrecisionName, list[str]], second: dict[PrecisionName, list[str]] | None = None
) -> dict[PrecisionName, list[str]]:
    """Return the first rank's results; at depth 2, the second rank's if only it failed."""
    for precision, said in (second or {}).items():
        if said and not is_ok(said[-1]) and is_ok(first[precision][-1]):
            first[precision][-1] = said[-1]
    return first


def tour_device(
    tour: Tour, wanted: list[str], *, skip: int = 0, limit: int | None, jobs: int, seconds: float
) -> bool:
    """Run the models in parallel, print a line for each and a summary; return whether all were right."""
    names = list(cases(wanted))[skip:][:limit]
    began = time.monotonic()
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    results: dict[tuple[str, PrecisionName], list[str]] = {}

    def work() -> None:
        worker = Worker(tour)
        while time.monotonic() - began < seconds:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            start = time.monotonic()
            for precision, said in worker.run(name).items():
                results[name, precision] = said
                print(_line(name, precision, said), f"[{time.monotonic() - start:.0f} s]", flush=True)
        worker.stop()

    print(f"{'model':36} {'':5}", *(f"{column:10}" for column in tour.columns))
    threads = [threading.Thread(target=work) for _ in range(max(1, min(jobs, len(names))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _summarize(results, names, tour, time.monotonic() - began)


def _line(name: str, precision: str, said: Sequence[str]) -> str:
    return " ".join([f"{name:36} {precision:5}", *(f"{each.split(':')[0][:10]:10}" for each in said)])


def markdown(results: Mapping[tuple[str, PrecisionName], list[str]], tour: Tour) -> str:
    """Return a table for docs/models.md: models with the same results share a row."""
    single = len(tour.placements) if 1 in tour.depths else 0
    stages = [*(["one stage"] if single else []), *(["two stages"] if 2 in tour.depths else [])]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(name for name, _ in results):
        cells: list[str] = []
        for precision in tour.precisions:
            kinds = [each.split(":")[0] for each in results.get((name, precision), [])]
            parts = (kinds[:single], kinds[single:])
            cells += [", ".join(dict.fromkeys(part)) for part in parts if part]
        rows.setdefault(tuple(cells), []).append(name)
    titles = [f"{precision}, {count}" for precision in tour.precisions for count in stages]
    lines = [["models", *titles], ["---"] * (1 + len(titles)), *(["; ".join(rows[k]), *k] for k in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _summarize(
    results: Mapping[tuple[str, PrecisionName], list[str]], names: Sequence[str], tour: Tour, seconds: float
) -> bool:
    good = True
    print()
    for (name, precision), said in sorted(results.items()):
        for reason in dict.fromkeys(
            each for each in said if not is_ok(each) and not each.startswith("not captured")
        ):
            where = [column for column, each in zip(tour.columns, said, strict=False) if each == reason]
            print(f"{name}, {precision}, {', '.join(where)}: {reason[:600]}")
    for precision in tour.precisions:
        for place, column in enumerate(tour.columns):
            rows = [said for (_, p), said in results.items() if p == precision and place < len(said)]
            kinds = Counter(said[place].split(":")[0] for said in rows)
            good &= not kinds.keys() - {OK, "not captured"}
            print(f"{precision} {column:10}", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
            equal = [said[place] for said in rows if is_ok(said[place])]
            widest = max(equal, key=lambda text: float(text.rpartition(" ")[2]), default="nothing ran")
            print(f"{'':15} at most: {widest}")
    print("", markdown(results, tour), "", sep="\n")
    finished = len({name for name, _ in results})
    print(f"{finished} of {len(names)} models in {seconds:.0f} s")
    return good and finished == len(names)
