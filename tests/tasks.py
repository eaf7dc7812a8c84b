"""Tasks of pool workers, and the same work in one plain process."""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import varuna.train.build
from tests.toys import make_inputs, make_model
from varuna import SampleOrder, Varuna, get_this_rank_config_varuna, get_varuna_config, plain_randomness
from varuna.capture import Captured, Source
from varuna.capture.model.batch import Batch
from varuna.capture.model.call_convention import CallConvention
from varuna.types import PrecisionName, format_stage_map

SEED = 11


def stage_map(depth: int, width: int) -> str:
    """Return the map of the launcher: rank r is stage r mod P of replica r div P."""
    return format_stage_map([[stage + depth * replica for replica in range(width)] for stage in range(depth)])


def global_batch(name: str, step: int, batch: int, dtype: torch.dtype) -> dict[str, object]:
    return make_inputs(name, batch, torch.Generator().manual_seed(1000 + step), dtype)


def take(inputs: Mapping[str, object], indices: Sequence[int], batch: int) -> dict[str, object]:
    return {
        key: value[list(indices)]
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == batch
        else value
        for key, value in inputs.items()
    }


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=0.01)
    return torch.optim.AdamW(parameters, lr=0.01)


class RememberingSource(Source):
    """Captures each toy once per process: tracing takes far longer than all the steps of a test."""

    toy: ClassVar[Hashable] = None
    remembered: ClassVar[dict[Hashable, Captured]] = {}

    def capture(
        self,
        inputs: Mapping[str, object],
        *,
        training: bool,
        batch: Batch | None = None,
        convention: CallConvention | None = None,
        precision: PrecisionName | None = None,
    ) -> Captured:
        convention, precision = convention or CallConvention(), precision or self.precision
        key = self.toy, self.signature(inputs, batch), training, convention.key, precision, self.device
        if key not in self.remembered:
            self.remembered[key] = super().capture(
                inputs, training=training, batch=batch, convention=convention, precision=precision
            )
        if training and self._partition is not None:
            self._partitioned = self._partitioned or self.remembered[key]  # later captures are cut like it
        return self.remembered[key]


@contextmanager
def remembering(toy: Hashable) -> Iterator[None]:
    """Within, what is wrapped is this toy."""
    varuna.train.build.Source, RememberingSource.toy = RememberingSource, toy  # type: ignore[misc]
    try:
        yield
    finally:
        varuna.train.build.Source = Source  # type: ignore[misc]


def train(
    name: str,
    depth: int,
    width: int,
    *,
    batch: int,
    chunk: int,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "sgd",
    accumulate: int = 1,
    clip: float | None = None,
    model_options: Mapping[str, Any] | None = None,
    evaluate_between: bool = False,
    batches: Sequence[int] | None = None,
    device: str = "cpu",
    timeout_seconds: float = 30,
    seed: int = SEED,
    mapping: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Trains a toy over depth × width ranks, or a map's; what it returns is the same on every rank."""
    if not mapping:
        mapping = stage_map(depth, width)
        assert get_varuna_config(mapping) == (depth, width)
    rank = dist.get_rank() if dist.is_initialized() else 0
    replica = get_this_rank_config_varuna(mapping, rank)[1]
    model = make_model(name, dtype=dtype, **(model_options or {}))
    sample = make_inputs(name, 2, torch.Generator().manual_seed(1), dtype)
    with remembering((name, dtype, str(model_options))):
        wrapped = Varuna(
            model,
            mapping,
            sample,
            batch,
            chunk,
            device=device,
            seed=seed,
            timeout_seconds=timeout_seconds,
            **options,
        )
    opt = make_optimizer(optimizer, wrapped.parameters())
    wrapped.set_optimizer(opt, init_loss_scale=1024)
    result: dict[str, Any] = {"losses": [], "norms": [], "evaluations": [], "most_held": 0}
    for step in range(steps):
        size = batches[step % len(batches)] if batches else batch
        inputs = global_batch(name, step, size, dtype)
        order = SampleOrder(size, batch_size=size, shuffle=False)
        own = take(inputs, order.replica(step=0, replica=replica, num_replicas=wrapped.data_depth), size)
        loss, overflow = wrapped.step(own, clip_grad_max_norm=clip)
        assert not overflow
        result["losses"].append(loss)
        result["norms"].append(wrapped.grad_norm)
        result["most_held"] = max(result["most_held"], wrapped._trainer.engine.stage.most_held)
        if evaluate_between:
            result["evaluations"].append(wrapped.evaluate(own))
        if (step + 1) % accumulate == 0:
            if step + 1 == steps:
                result["gradients"] = gather_gradients(wrapped)
            opt.step()
            wrapped.zero_grad()
    result["state"] = wrapped.full_state_dict()
    result["parameters"] = [n for n, _ in wrapped.named_parameters()]
    wrapped.close()
    varuna.train.build.Source = Source  # type: ignore[misc]
    return result


def gather_gradients(wrapped: Varuna) -> dict[str, Tensor]:
    own = {name: p.grad.cpu() for name, p in wrapped.named_parameters() if p.grad is not None}
    merged: dict[str, Tensor] = {}
    for part in wrapped._session.gather(own, dict[str, Tensor]):
        for key, gradient in part.items():
            if key in merged:
                assert torch.equal(merged[key], gradient), (
                    f"replicas or ties of {key} hold different gradients"
                )
            merged[key] = gradient.clone()
    return merged


def train_plainly(
    name: str,
    *,
    batch: int,
    steps: int = 3,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "sgd",
    accumulate: int = 1,
    clip: float | None = None,
    model_options: Mapping[str, Any] | None = None,
    evaluate_between: bool = False,
    batches: Sequence[int] | None = None,
    random: bool = False,
    chunk: int | None = None,
) -> dict[str, Any]:
    """One process, the unwrapped model, the whole batch; in pieces of `chunk` for BatchNorm."""
    model = make_model(name, dtype=dtype, **(model_options or {}))
    opt = make_optimizer(optimizer, model.parameters())
    result: dict[str, Any] = {"losses": [], "norms": [], "evaluations": []}
    for step in range(steps):
        size = batches[step % len(batches)] if batches else batch
        inputs = global_batch(name, step, size, dtype)
        total = 0.0
        for first in range(0, size, chunk or size):
            count = min(chunk or size, size - first)
            part = take(inputs, range(first, first + count), size)
            drawing = plain_randomness(seed=SEED, step=step, batch_size=count, first_sample=first)
            with drawing if random else nullcontext():
                loss = find_loss(model(**part)) * (count / size)
            loss.backward()
            total += loss.item()
        result["losses"].append(total)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            result["norms"].append(float(norm))
        if evaluate_between:
            model.eval()
            with torch.no_grad():
                result["evaluations"].append(float(find_loss(model(**inputs))))
            model.train()
        if (step + 1) % accumulate == 0:
            if step + 1 == steps:
                named = model.named_parameters()
                result["gradients"] = {n: p.grad.clone() for n, p in named if p.grad is not None}
            opt.step()
            opt.zero_grad()
    result["state"] = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return result


def find_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, Mapping) else output[0]


def compare(found: Mapping[str, Any], expected: Mapping[str, Any], *, rtol: float, atol: float) -> None:
    """Losses, gradients and state, element by element."""
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=rtol, atol=atol)
    for part in ("gradients", "state"):
        if part in expected and part in found:
            assert found[part].keys() == expected[part].keys(), part
            for key, value in expected[part].items():
                torch.testing.assert_close(
                    found[part][key],
                    value,
                    rtol=rtol,
                    atol=atol,
                    msg=lambda m, k=key, p=part: f"{p} of {k}: {m}",
                )


@contextmanager
def logged(name: str = "varuna") -> Iterator[list[str]]:
    """Collect log messages within the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)
