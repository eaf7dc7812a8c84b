"""Runs one step of one stage: asks the cursor what comes next, does it, and sends what it made.

    cursor.next(arrived) ──► forward / recompute / backward ──► link to a neighbour
            ▲                                                        │
            └────────────── arrivals wake the engine ◄───────────────┘

The engine knows nothing of models or optimizers: a job says which program runs on which inputs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol

import torch
from torch import Tensor

from varuna.errors import PeerLost, VarunaError
from varuna.execute.comm.wait import Waiter
from varuna.execute.device.event_times import recorder_for
from varuna.execute.device.reading import Reading, runs_ahead
from varuna.execute.step.scatter import MicroBatch
from varuna.execute.step.stage import Program, Stage
from varuna.schedule import Cursor
from varuna.types import Instruction, Op, TensorSpec, Work

EVALUATION_WINDOW = 4
"""Micro-batches that may be under way between two stages in an evaluation: enough to overlap, bounded."""

Keep = Literal["graph", "inputs", "nothing"]
"""What a stage holds of a forward: all that its backward needs, or what the forward was given, or nothing."""

VERBS: dict[Op, str] = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward of the inputs",
    "W": "backward of the weights",
}


class Neighbour(Protocol):
    """The stage before or after this one: a link to one of its ranks, or a crowd of them."""

    @property
    def peer(self) -> int: ...
    @property
    def ready(self) -> int: ...
    @property
    def over(self) -> bool: ...
    def send(self, tensors: Sequence[Tensor]) -> None: ...
    def take(self) -> list[Tensor]: ...


@dataclass(frozen=True)
class Job:
    """A micro-batch with the program that runs it."""

    microbatch: MicroBatch
    program: Program
    work: Work


class Engine:
    def __init__(
        self,
        stage: Stage,
        *,
        index: int,
        stages: int,
        upstream: Neighbour | None,
        downstream: Neighbour | None,
        waiter: Waiter | None,
        device: torch.device,
        poll: Callable[[], None] = lambda: None,
        delay: Callable[[Op, int], float] | None = None,
    ) -> None:
        self.stage = stage
        self.index = index
        self.stages = stages
        self.upstream = upstream
        self.downstream = downstream
        self.waiter = waiter
        self.device = device
        self.poll = poll  # takes in what has arrived
        self.delay = (
            delay  # seconds of extra time for an instruction: slow machines, for tests and benchmarks
        )
        self.recorder = recorder_for(device)
        self.where = ""  # what is being done, in words, for errors

    def train(
        self,
        jobs: Sequence[Job],
        *,
        row: Sequence[Instruction],
        limit: int,
        opportunistic: bool,
        seed_gradients: Sequence[float],
        announce: Callable[[float], None],
        before_last_backward: Callable[[], Callable[[], None]],
    ) -> None:
        """Runs the row. `announce` is told the sum of weight × loss as soon as all losses are known and none
        of the neighbours waits; `before_last_backward` returns what to call after it.

        A device that runs ahead knows its losses later than the host its next instruction: there the last
        backward is queued first.
        """
        cursor = Cursor(row, stage=self.index, stages=self.stages, limit=limit, opportunistic=opportunistic)
        recomputed = {i.microbatch for i in row if i.op == "R"}
        last_op: Op = "W" if any(i.op == "W" for i in row) else "B"
        last = (last_op, max((n for n, job in enumerate(jobs) if job.microbatch.size), default=-1))
        activations = gradients = 0  # taken so far
        losses: list[Tensor] = []
        seeds: dict[float, Tensor] = {}  # micro-batches of one weight share theirs
        self.recorder.clear()
        self.stage.clear()

        while not cursor.finished:
            self.poll()
            arrived_activations = activations + (self.upstream.ready if self.upstream else 0)
            arrived_gradients = gradients + (self.downstream.ready if self.downstream else 0)
            instruction = cursor.next(arrived_activations, arrived_gradients)
            if instruction is None:
                self._wait_for(cursor, arrived_activations - activations, arrived_gradients - gradients)
                continue

            op, number = instruction.op, instruction.microbatch
            job = jobs[number]
            started = self._start(op, number)
            if op == "F":
                received = self._take(self.upstream, job.program.received)
                activations += 1
                outputs = self.stage.forward(
                    number,
                    job.program,
                    received,
                    job.microbatch.inputs,
                    job.work,
                    keep_graph=number not in recomputed,
                )
                if self.downstream is not None:
                    self._send(self.downstream, outputs)
                else:
                    losses.append(outputs[0])
            elif op == "R":
                self.stage.recompute(number)
            else:
                losses_are_there = op != "W" and number == len(jobs) - 1
                reading = Reading(torch.stack(losses)) if losses and losses_are_there else None
                if losses_are_there and not runs_ahead(self.device):
                    announce(self._weighted_sum(reading, jobs))
                stop = before_last_backward() if (op, number) == last else None
                if op == "W":
                    self.stage.backward_weights(number)
                else:
                    if self.downstream is None:
                        incoming = [self._seed(seed_gradients[number], losses[number], seeds)]
                    else:
                        needed = [spec for spec in job.program.sent if spec.needs_grad]
                        incoming = self._take(self.downstream, needed)
                    gradients += 1
                    whole = op == "B"
                    run = self.stage.backward if whole else self.stage.backward_inputs
                    outgoing = run(number, incoming)
                    if self.upstream is not None:
                        self._send(self.upstream, outgoing)
                if stop is not None:
                    stop()
                if losses_are_there and runs_ahead(self.device):
                    announce(self._weighted_sum(reading, jobs))
            self.recorder.add(op, number, started, time.perf_counter())

    def evaluate(self, jobs: Sequence[Job]) -> float:
        """Forwards alone; the sum of weight × loss on the last stage, else 0."""
        losses = [outputs[0] for outputs in self.forwards(jobs, keep="nothing")]
        return self._weighted_sum(Reading(torch.stack(losses)) if losses else None, jobs)

    # ------------------------------------------------------------ a step in two halves

    def forwards(self, jobs: Sequence[Job], *, keep: Keep) -> list[list[Tensor]]:
        """All forwards; what each gives on the last stage. What is kept for the backwards, the stage holds.

        Where nothing is kept, the stage after acknowledges each micro-batch, so that a fast stage cannot
        flood a slow one.
        """
        results: list[list[Tensor]] = []
        acknowledged = 0
        self.recorder.clear()
        self.stage.clear()
        for number, job in enumerate(jobs):
            while self._is_waited_for(keep) and number - acknowledged >= EVALUATION_WINDOW:
                self._take(self.downstream, ())
                acknowledged += 1
            started = self._start("F", number)
            received = self._take(self.upstream, job.program.received)
            inputs = job.microbatch.inputs
            if keep == "nothing":
                if self.upstream is not None:
                    self._send(self.upstream, [])
                outputs = self.stage.evaluate(job.program, received, inputs, job.work)
            else:
                outputs = self.stage.forward(
                    number, job.program, received, inputs, job.work, keep_graph=keep == "graph"
                )
            if self.downstream is not None:
                self._send(self.downstream, outputs)
            else:
                results.append(outputs)
            self.recorder.add("F", number, started, time.perf_counter())
        while self._is_waited_for(keep) and acknowledged < len(jobs):
            self._take(self.downstream, ())
            acknowledged += 1
        return results

    def _is_waited_for(self, keep: Keep) -> bool:
        return keep == "nothing" and self.downstream is not None

    def backwards(
        self,
        jobs: Sequence[Job],
        gradients: Sequence[Sequence[Tensor | None]],  # of each micro-batch's results, on the last stage
        *,
        again: bool,  # whether these forwards will have another backward
        before_last: Callable[[], Callable[[], None]],  # returns what to call after it
    ) -> None:
        """All backwards, of forwards that the stage holds; run again first where only inputs were kept."""
        last = max((n for n, job in enumerate(jobs) if job.microbatch.size), default=-1)
        for number, job in enumerate(jobs):
            if not self.stage.held[number].edges:
                started = self._start("R", number)
                self.stage.recompute(number)
                self.recorder.add("R", number, started, time.perf_counter())
            started = self._start("B", number)
            if self.downstream is None:
                incoming = gradients[number]
            else:
                incoming = self._take(self.downstream, [spec for spec in job.program.sent if spec.needs_grad])
            stop = before_last() if number == last else None
            outgoing = self.stage.backward(number, incoming, again=again)
            if self.upstream is not None:
                self._send(self.upstream, outgoing)
            if stop is not None:
                stop()
            self.recorder.add("B", number, started, time.perf_counter())

    # ------------------------------------------------------------ what is sent, what arrives

    def _send(self, neighbour: Neighbour, tensors: Sequence[Tensor]) -> None:
        try:
            neighbour.send(tensors)
        except PeerLost as error:
            self._find_cause(error)

    def _take_from(self, neighbour: Neighbour) -> list[Tensor]:
        try:
            return neighbour.take()
        except PeerLost as error:
            self._find_cause(error)

    def _find_cause(self, error: PeerLost) -> NoReturn:
        """A neighbour that has failed says so on the board, and then ends."""
        assert self.waiter is not None, "a pipeline of one stage has nobody to lose"
        self.waiter.raise_cause(error)

    def _take(self, neighbour: Neighbour | None, expected: Sequence[TensorSpec]) -> list[Tensor]:
        if neighbour is None:
            return []
        if neighbour.ready == 0:
            assert self.waiter is not None
            peer = neighbour
            self.waiter.until(
                lambda: peer.ready > 0 or peer.over, lambda: f"{self.where}: a message of rank {peer.peer}"
            )
        tensors = self._take_from(neighbour)
        check_arrival(tensors, expected, neighbour.peer)
        return tensors

    def _wait_for(self, cursor: Cursor, activations: int, gradients: int) -> None:
        """Until one more activation or gradient is there than when the cursor was asked."""
        assert self.waiter is not None, "a pipeline of one stage has nobody to wait for"
        started = time.perf_counter()
        upstream, downstream = self.upstream, self.downstream

        def something_new() -> bool:
            return (upstream is not None and (upstream.ready > activations or upstream.over)) or (
                downstream is not None and (downstream.ready > gradients or downstream.over)
            )

        def in_words() -> str:
            kind, number = cursor.waiting_for()
            peer = upstream if kind == "activation" else downstream
            return f"{kind} {number} of rank {peer.peer if peer else '?'}"

        self.waiter.until(something_new, in_words)
        for peer, known in ((upstream, activations), (downstream, gradients)):
            if peer is not None and peer.over and peer.ready <= known:
                self._take_from(peer)  # raises: it has ended, though more was expected of it
        self.recorder.add("wait", -1, started, time.perf_counter())

    def _start(self, op: Op, number: int) -> float:
        """Says what is done, for errors; returns when it began. A context manager would cost more than it."""
        self.where = f"stage {self.index}, micro-batch {number}, {VERBS[op]}"
        started = time.perf_counter()
        if self.delay is not None:
            time.sleep(self.delay(op, number))
        return started

    def _seed(self, value: float, loss: Tensor, made: dict[float, Tensor]) -> Tensor:
        """The gradient that a loss starts its backward with."""
        if value not in made:
            made[value] = torch.full((), value, dtype=loss.dtype, device=self.device)
        return made[value]

    def _weighted_sum(self, losses: Reading | None, jobs: Sequence[Job]) -> float:
        """In double precision, and with a single wait for the device; 0 where the stage has no loss."""
        if losses is None:
            return 0.0
        values = losses.numbers(self.waiter)
        return sum(value * job.microbatch.weight for value, job in zip(values, jobs, strict=True))


def check_arrival(tensors: Sequence[Tensor], expected: Sequence[TensorSpec], rank: int) -> None:
    """A neighbour that sends something else than the plan says is an error, never garbage."""
    for tensor, spec in zip(tensors, expected, strict=False):
        if str(tensor.dtype)[6:] != spec.dtype or tensor.dim() != len(spec.dims):
            raise VarunaError(
                f"rank {rank} sent {str(tensor.dtype)[6:]}{list(tensor.shape)}, this stage expects {spec} "
                "(do both run the same model, precision and micro-batch size?)"
            )
    if len(tensors) != len(expected):
        raise VarunaError(
            f"rank {rank} sent {len(tensors)} tensors where this stage expects {len(expected)}: "
            f"{', '.join(map(str, expected))} (do both run the same model?)"
        )
