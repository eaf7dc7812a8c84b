"""A job whose generations change in place, in the processes of the pool; the test gives the orders."""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.tasks import SEED, global_batch, make_optimizer, remembering, take
from tests.toys import make_inputs, make_model
from varuna import Varuna
from varuna.environment import VarunaEnvironment
from varuna.errors import PeerLost
from varuna.execute.comm.session import Session
from varuna.execute.update.offload import keep_state_on_host
from varuna.execute.update.precision import DynamicLossScale
from varuna.morph.run.order_page import OrderWriter
from varuna.morph.run.progress_page import ProgressReader
from varuna.train.hot import copies
from varuna.train.hot.moving import MovingState
from varuna.types import Layout, MorphOrder, parse_stage_map

BATCH, CHUNK = 8, 2
SILENT_SECONDS = 60.0
"""Below all timeouts of the job: the manager's order ends a wait for a silent process earlier."""


class Generation(NamedTuple):
    """A layout over some of the pool's processes, and its number of steps."""

    mapping: str
    members: tuple[int, ...]  # process of each rank
    steps: int = 2
    lost: tuple[int, ...] = ()  # processes that die in the first step of this generation

    @property
    def layout(self) -> Layout:
        return Layout(parse_stage_map(self.mapping), BATCH, CHUNK)


class Killed(Exception):
    """This process plays one that was killed."""


def own_sockets() -> set[int]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                found.add(int(entry.name))
    return found


def die(kept: set[int]) -> None:
    """Close all connections without a goodbye, as the kernel does for a killed process."""
    for fd in own_sockets() - kept:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.shutdown(socket.SHUT_RDWR)
    raise Killed


def give_when_waiting(progress: ProgressReader, orders: OrderWriter, order: MorphOrder) -> None:
    """Play the agent: give the order when the worker has noticed the loss."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not progress.read().waits:
        time.sleep(0.002)
    orders.give(order)


def fall_silent(folder: Path, others: Sequence[int]) -> None:
    """Play a process that is stopped, with open connections, until all others have finished without it."""
    for state in ("updates", "finished"):
        deadline = time.monotonic() + SILENT_SECONDS
        while not all((folder / f"{state}_{other}").exists() for other in others):
            assert time.monotonic() < deadline, "the others wait for this process"
            time.sleep(0.002)
        (folder / "silent").touch()
    raise Killed


def give_after(path: Path, orders: OrderWriter, order: MorphOrder) -> None:
    """Play the agent: give the order when the manager has lost a process that is silent."""
    while not path.exists():
        time.sleep(0.002)
    orders.give(order)


def wait_for_files(*paths: Path) -> None:
    """Wait until other ranks have written these files."""
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "the other ranks have not come so far"
        time.sleep(0.002)


def break_commit(wrapped: Varuna, others: Sequence[Path]) -> None:
    """Let the next commit fail on this rank after it has succeeded on others, which write files then."""
    session, finish = wrapped._session, wrapped._session.finish_barrier

    def broken() -> None:
        finish()
        if wrapped._hot.uncommitted is not None:
            wait_for_files(*others)
            raise PeerLost("another rank ended")

    session.finish_barrier = broken  # type: ignore[method-assign]


@contextmanager
def interrupting(
    wrapped: Varuna,
    place: str,
    death: Path,
    kept: set[int],
    *,
    process: int,
    generations: Sequence[Generation],
) -> Iterator[None]:
    """Interrupt the morph before the last one by the death of a process that the last generation lacks.

    It dies after the "handover" of its tensors, or at the "barrier" after it. There, one process does not
    know that the barrier has succeeded on all ranks.
    """
    last = generations[-1]
    dies, doubts = process in last.lost, process == last.members[-1]
    hand_over, gather = MovingState.hand_over, Session.gather_numbers

    def end() -> None:
        death.touch()
        die(kept)

    def trapped_handover(self: MovingState, *args: Any) -> int:
        found = hand_over(self, *args)
        if place == "handover" and dies:
            end()
        return found

    def trapped_gather(self: Session, numbers: Sequence[float]) -> list[list[float]]:
        found, move = gather(self, numbers), wrapped._hot.move
        if place == "barrier" and move is not None and move.generation == len(generations) - 1:
            if dies:
                wait_for_files(*(death.with_suffix(f".{other}") for other in last.members))
                end()
            death.with_suffix(f".{process}").touch()
            if doubts:
                wait_for_files(death)
                raise PeerLost("another rank ended")
        return found

    MovingState.hand_over = trapped_handover  # type: ignore[method-assign]
    Session.gather_numbers = trapped_gather  # type: ignore[method-assign]
    try:
        yield
    finally:
        MovingState.hand_over = hand_over  # type: ignore[method-assign]
        Session.gather_numbers = gather  # type: ignore[method-assign]


def wait_for_copies(wrapped: Varuna) -> None:
    """Wait until the copies that are on their way have arrived: they count at the next step."""
    if (mirror := wrapped._state_copies._mirror) is not None:
        mirror.wait()


def order_of(generations: Sequence[Generation], index: int, process: int, port: int) -> MorphOrder:
    """Return the order of one process to enter a generation."""
    last, following = generations[index - 1], generations[index]
    ranks = {member: rank for rank, member in enumerate(last.members)}
    return MorphOrder(
        generation=index + 1,
        layout=following.layout,
        last_layout=last.layout,
        rank=following.members.index(process) if process in following.members else None,
        previous=tuple(ranks.get(member) for member in following.members),
        leaving=tuple(
            rank
            for rank, member in enumerate(last.members)
            if member not in following.members and member not in following.lost
        ),
        lost=tuple(ranks[member] for member in following.lost),
        old_rank=ranks.get(process),
        master_addr="127.0.0.1",
        master_port=port,
        environment={**VarunaEnvironment(generation=index + 1, chunk_size=CHUNK).write()},
    )


@contextmanager
def managed(folder: str, first: Generation, process: int, ports: Sequence[int], world: int) -> Iterator[bool]:
    """Be a worker of a managed job, with pages of its own; yields whether it is to join later."""
    dist.destroy_process_group()
    joins = process not in first.members
    before = dict(os.environ)
    page = Path(folder) / f"progress_{process}"
    ours = VarunaEnvironment(
        progress_file=str(page), generation=1, chunk_size=CHUNK, joins="1" if joins else None, hot="1"
    )
    os.environ.update(
        RANK=str(0 if joins else first.members.index(process)),
        WORLD_SIZE=str(len(first.members)),
        MASTER_PORT=str(ports[0]),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        **ours.write(),
    )
    try:
        yield joins
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)
        store = dist.TCPStore("127.0.0.1", ports[-1], world, is_master=False)
        dist.init_process_group("gloo", store=store, rank=process, world_size=world)


def play(
    name: str,
    generations: Sequence[Generation],
    folder: str,
    ports: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "adam",
    accumulate: int = 1,
    clip: float | None = None,
    clips_itself: bool = False,
    registers: bool = True,
    offloads: bool = False,
    copy_cost: float | None = None,  # share of the step time for copies on other ranks
    interrupts: str = "",  # the morph before the last generation, by the death of the process that this lacks
    dies_in: str = "",  # "fetch", "backward", "commit", "clip", "evaluate"; "update": it falls silent
    model_options: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train through all generations; this process takes part in some of them."""
    process, world, kept = dist.get_rank(), dist.get_world_size(), own_sockets()
    copies.MOST_COST = 0.01 if copy_cost is None else copy_cost
    starts = [sum(one.steps for one in generations[:index]) for index in range(len(generations))]
    dies_in_morph = bool(interrupts) and process in generations[-1].lost
    doomed = {start for start, one in zip(starts, generations, strict=True) if process in one.lost}
    doomed = set() if dies_in_morph else doomed
    death = Path(folder) / "death_in_morph"
    others_done = [Path(folder) / f"done_{other}" for other in (1, 2)]

    def delay(op: str, number: int) -> float:
        if dies_in == "backward" and op == "B" and number == 1 and wrapped.iteration in doomed:
            die(kept)
        return 0.0

    with managed(folder, generations[0], process, ports, world) as joins, ExitStack() as stack:
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        model = make_model(name, dtype=dtype, seed=process if joins else 0, **model_options or {})
        sample = make_inputs(name, 2, torch.Generator().manual_seed(1), dtype)
        with remembering((name, dtype, str(model_options))):
            wrapped = Varuna(
                *(model, generations[0].mapping, sample, BATCH, CHUNK),
                **{"device": "cpu", "seed": SEED + joins, "timeout_seconds": 80, **options},
                compute_delay=delay,
            )
        opt = make_optimizer(optimizer, wrapped.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.7)
        if registers:
            wrapped.register("schedule", schedule)
        wrapped.set_optimizer(opt, init_loss_scale=1024)
        if offloads:  # on a CPU, Varuna leaves the state where it is
            keep_state_on_host(opt, chunk_bytes=100)
        if isinstance(wrapped._loss_scale, DynamicLossScale):
            wrapped._loss_scale.growth_interval = 3
        listed = list(wrapped.parameters())  # once, as many scripts do
        ends = [sum(one.steps for one in generations[: index + 1]) for index in range(len(generations))]
        enters = [index for index in range(1, len(generations)) if process in generations[index].members]
        for index, one in enumerate(generations):
            if one.lost and process in generations[index - 1].members and process not in one.lost:
                order = order_of(generations, index, process, ports[index])
                give, due = give_when_waiting, progress
                if dies_in == "update" or (interrupts and one is generations[-1]):
                    give, due = give_after, Path(folder) / "silent" if dies_in == "update" else death
                threading.Thread(target=give, args=(due, orders, order), daemon=True).start()
        if joins:
            orders.give(order_of(generations, enters[0], process, ports[enters[0]]))
        groups = [(id(group), id(group["params"])) for group in opt.param_groups]
        result: dict[str, Any] = {"losses": {}, "pid": os.getpid(), "layouts": [], "kept": []}

        def fetch(samples: Any) -> dict[str, object]:
            step, first = divmod(samples.start, BATCH)
            if step in doomed and dies_in in ("fetch", "commit"):
                if dies_in == "commit":
                    wait_for_files(*others_done)
                die(kept)
            inputs = global_batch(name, step, BATCH, dtype)
            return take(inputs, range(first, first + len(samples)), BATCH)

        known: dict[str, int] = {}
        stack.enter_context(
            interrupting(wrapped, interrupts, death, kept, process=process, generations=generations)
        )
        try:
            for step, inputs in wrapped.batches(fetch, steps=ends[-1]):
                ids = {n: id(p) for n, p in wrapped.named_parameters()}
                result["kept"].append(all(ids[n] == known[n] for n in ids.keys() & known.keys()))
                known = ids
                if step + 1 in ends[:-1] and not generations[ends.index(step + 1) + 1].lost:
                    index = ends.index(step + 1) + 1
                    orders.give(order_of(generations, index, process, ports[index]))
                if dies_in == "commit" and process == 0 and generations[1].lost and step + 1 == ends[0]:
                    break_commit(wrapped, others_done)
                if copy_cost is not None and step == ends[0] and (now := progress.read()).generation == 1:
                    assert now.copy_of is not None, "copies are off, or too late"
                loss, overflow = wrapped.step(inputs, clip_grad_max_norm=None if clips_itself else clip)
                if copy_cost is not None:
                    wait_for_copies(wrapped)
                is_trained = not math.isnan(loss)
                assert overflow == (not is_trained)
                if dies_in == "clip" and step in doomed:
                    die(kept)
                if clips_itself and clip is not None:
                    torch.nn.utils.clip_grad_norm_(listed, clip)
                result["void"] = result.get("void", 0) + (not is_trained)
                if is_trained:
                    assert step == wrapped.iteration - 1
                    result["losses"][step] = loss
                    result["layouts"].append((wrapped.partitions, wrapped.data_depth, wrapped.rank))
                if step + 1 == ends[0]:
                    (Path(folder) / f"done_{process}").touch()
                if (step + 1) % accumulate == 0:
                    if step in doomed and dies_in == "update":
                        fall_silent(Path(folder), [one for one in range(world) if one != process])
                    if step == ends[0]:
                        (Path(folder) / f"updates_{process}").touch()
                    opt.step()
                    wrapped.zero_grad()
                schedule.step()
                if dies_in == "evaluate" and step + 1 == ends[0]:
                    if step + 1 in doomed:
                        die(kept)
                    batch = global_batch(name, 0, BATCH, dtype)
                    result["evaluated"] = wrapped.evaluate(lambda share: take(batch, share, BATCH), BATCH)  # noqa: B023
            result["state"] = wrapped.full_state_dict()
            (Path(folder) / f"finished_{process}").touch()
        except SystemExit as end:
            result["exit"] = end.code
        except Killed:
            result["killed"] = True
        result["loss_scale"] = wrapped.get_loss_scale()
        result["stateful"] = [n for n, p in wrapped.named_parameters() if opt.state.get(p)]
        result["seconds"] = progress.read().morph_seconds
        result["bytes"] = progress.read().morph_bytes
        result["generation"] = progress.read().generation
        result["groups"] = groups == [(id(group), id(group["params"])) for group in opt.param_groups]
        result["finalizers"] = [one.peek()[1].__qualname__ for one in wrapped._finalizers if one.alive]  # type: ignore[index]
        wrapped.close()
        orders.close()
        progress.close()
        return result


def run(
    pool: Pool,
    folder: Path,
    name: str,
    generations: Sequence[Generation],
    *,
    through: Callable[..., Any] | None = None,  # calls `play`; its result is returned
    **options: Any,
) -> list[Any]:
    world = 1 + max(member for one in generations for member in one.members)
    stores = [
        dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        for _ in range(len(generations) + 1)
    ]
    ports = [store.port for store in stores]
    job: tuple[Any, ...] = (name, list(generations), str(folder), ports)
    if through is not None:
        return pool.run(through, world, play, *job, **options)
    return pool.run(play, world, *job, **options)


def is_batched(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == BATCH


def train_plainly(
    name: str,
    steps: int,
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "adam",
    accumulate: int = 1,
    clip: float | None = None,
    model_options: dict[str, Any] | None = None,
    chunk: int | None = None,
    precision: str = "fp32",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in one plain process."""
    from tests.tasks import find_loss
    from varuna import plain_randomness

    model = make_model(name, dtype=dtype, seed=0, **model_options or {})
    opt = make_optimizer(optimizer, model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, gamma=0.7)
    losses = []
    for step in range(steps):
        inputs, total = global_batch(name, step, BATCH, dtype), 0.0
        for first in range(0, BATCH, chunk or BATCH):
            count = min(chunk or BATCH, BATCH - first)
            low = torch.autocast("cpu", torch.float16, enabled=precision == "fp16")
            with plain_randomness(seed=SEED, step=step, batch_size=count, first_sample=first), low:
                # Views, as in a pipeline: on a CPU, the last bit of a product depends on the alignment.
                chunked = {k: v[first : first + count] if is_batched(v) else v for k, v in inputs.items()}
                loss = find_loss(model(**chunked)) * count / BATCH
            loss.backward()
            total += loss.item()
        losses.append(total)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if (step + 1) % accumulate == 0:
            opt.step()
            opt.zero_grad()
        schedule.step()
    return losses, {key: value.detach().clone() for key, value in model.state_dict().items()}
