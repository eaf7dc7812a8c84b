"""Runs one step of one stage: takes the next instruction from the cursor, runs it, and sends the result.

    cursor.next(arrived) ──► forward / recompute / backward ──► link to an adjacent stage
            ▲                                                        │
            └────────────── arrivals wake the engine ◄───────────────┘

The engine does not know models or optimizers: a job names the program and its inputs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import torch
from torch import Tensor

from varuna.errors import PeerLost, VarunaError
from varuna.execute.comm.link import PeerLink
from varuna.execute.comm.stage_links import StageLinks
from varuna.execute.comm.wait import Waiter
from varuna.execute.device.event_times import recorder_for
from varuna.execute.device.host_copy import HostCopy
from varuna.execute.device.profiled import profiled
from varuna.execute.step.scatter import MicroBatch
from varuna.execute.step.stage import Stage, StageProgram
from varuna.observe.record import Recorder
from varuna.schedule import Cursor
from varuna.types import Instruction, Op, TensorSpec, Work

EVALUATION_WINDOW = 4
"""In an evaluation, a stage runs at most this many micro-batches ahead of the next stage."""

Keep = Literal["graph", "inputs", "nothing"]
"""Kept of a forward: all that its backward needs, only the inputs, or nothing."""

AdjacentStage = PeerLink | StageLinks
"""Connection to the previous or next stage."""

VERBS: dict[Op, str] = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward of the inputs",
    "W": "backward of the weights",
}


@dataclass(frozen=True)
class MicroBatchJob:
    """A micro-batch and the program that runs it."""

    microbatch: MicroBatch
    program: StageProgram
    work: Work


@dataclass
class TrainingStep:
    """A training step in progress."""

    jobs: Sequence[MicroBatchJob]
    recomputed: frozenset[int]
    last_backward: tuple[Op, int]
    seed_gradients: Sequence[float]  # gradient of each micro-batch's loss
    announce: Callable[[float], None]
    before_last_backward: Callable[[], Callable[[], None]]
    activations: int = 0  # taken so far
    gradients: int = 0
    losses: list[Tensor] = field(default_factory=list)
    seeds: dict[float, Tensor] = field(default_factory=dict)  # micro-batches of equal weight share one


@dataclass
class Engine:
    stage: Stage
    _: KW_ONLY
    index: int
    stages: int
    upstream: AdjacentStage | None
    downstream: AdjacentStage | None
    waiter: Waiter | None
    device: torch.device
    poll: Callable[[], None] = lambda: None  # reads what has arrived
    delay: Callable[[Op, int], float] | None = None  # extra seconds: simulates slow machines
    recorder: Recorder = field(init=False)
    records_sends: bool = field(default=False, init=False)  # for traces
    where: str = field(default="", init=False)  # the current operation, for errors

    def __post_init__(self) -> None:
        self.recorder = recorder_for(self.device)

    def train(
        self,
        jobs: Sequence[MicroBatchJob],
        *,
        row: Sequence[Instruction],
        limit: int,
        opportunistic: bool,
        seed_gradients: Sequence[float],
        announce: Callable[[float], None],
        before_last_backward: Callable[[], Callable[[], None]],
    ) -> None:
        """Run the instructions of the row.

        `announce` gets the sum of weight × loss as soon as all losses are known and no adjacent stage waits.
        `before_last_backward` is called before the last backward, and what it returns after it.
        """
        cursor = Cursor(row, stage=self.index, stages=self.stages, limit=limit, opportunistic=opportunistic)
        last_op: Op = "W" if any(i.op == "W" for i in row) else "B"
        last_number = max((n for n, job in enumerate(jobs) if job.microbatch.size), default=-1)
        step = TrainingStep(
            jobs,
            frozenset(i.microbatch for i in row if i.op == "R"),
            (last_op, last_number),
            seed_gradients,
            announce,
            before_last_backward,
        )
        self.recorder.clear()
        self.stage.clear()
        while not cursor.finished:
            self.poll()
            activations = self.upstream.ready if self.upstream else 0
            gradients = self.downstream.ready if self.downstream else 0
            instruction = cursor.next(step.activations + activations, step.gradients + gradients)
            if instruction is None:
                self._wait_for(cursor, activations, gradients)
                continue
            op, number = instruction.op, instruction.microbatch
            started = self._start(op, number)
            with profiled(VERBS[op], number):
                self._run(step, op, number)
            self.recorder.add(op, number, started, time.perf_counter())

    def _run(self, step: TrainingStep, op: Op, number: int) -> None:
        if op == "F":
            step.activations += 1
            keep: Keep = "inputs" if number in step.recomputed else "graph"
            outputs = self._forward(number, step.jobs[number], keep)
            if self.downstream is None:
                step.losses.append(outputs[0])
        elif op == "R":
            self.stage.recompute(number)
        else:
            self._run_backward(step, op, number)

    def _forward(self, number: int, job: MicroBatchJob, keep: Keep) -> list[Tensor]:
        """Run one forward, send its outputs to the next stage, and return them."""
        received = self._take(self.upstream, job.program.received)
        inputs = job.microbatch.inputs
        if keep == "nothing":
            self._send(self.upstream, [])  # acknowledges the micro-batch
            outputs = self.stage.evaluate(job.program, received, inputs, job.work)
        else:
            outputs = self.stage.forward(
                number,
                job.program,
                received,
                inputs,
                job.work,
                keep_graph=keep == "graph",
                wants_gradients=self.upstream is not None and not self.upstream.took_frozen,
            )
        self._send(self.downstream, outputs, frozen=keep != "nothing" and not self.stage.held[number].trains)
        return outputs

    def _run_backward(self, step: TrainingStep, op: Op, number: int) -> None:
        """Run B, I or W. With the last B or I all losses are known and are announced.

        On a device that runs ahead of its host, the backward is queued first: the losses are known later.
        """
        losses_known = op != "W" and number == len(step.jobs) - 1
        losses = HostCopy(torch.stack(step.losses)) if step.losses and losses_known else None
        runs_ahead = self.device.type == "cuda"
        if losses_known and not runs_ahead:
            step.announce(self._weighted_sum(losses, step.jobs))
        stop = step.before_last_backward() if (op, number) == step.last_backward else None
        try:
            if op == "W":
                self.stage.backward_weights(number)
            else:
                if self.downstream is None:
                    incoming = [self._seed(step, number)]
                else:
                    incoming = self._take(self.downstream, self._returned(number, step.jobs[number]))
                step.gradients += 1
                run = self.stage.backward if op == "B" else self.stage.backward_inputs
                self._send(self.upstream, run(number, incoming))
        finally:
            if stop is not None:
                stop()
        if losses_known and runs_ahead:
            step.announce(self._weighted_sum(losses, step.jobs))

    def _seed(self, step: TrainingStep, number: int) -> Tensor:
        """Return the gradient of the loss of a micro-batch."""
        value = step.seed_gradients[number]
        if value not in step.seeds:
            step.seeds[value] = torch.full((), value, dtype=step.losses[number].dtype, device=self.device)
        return step.seeds[value]

    def evaluate(self, jobs: Sequence[MicroBatchJob]) -> float:
        """Run forwards only. Return the sum of weight × loss on the last stage, else 0."""
        losses = [outputs[0] for outputs in self.forwards(jobs, keep="nothing")]
        return self._weighted_sum(HostCopy(torch.stack(losses)) if losses else None, jobs)

    def forwards(self, jobs: Sequence[MicroBatchJob], *, keep: Keep) -> list[list[Tensor]]:
        """Run all forwards and return the outputs on the last stage.

        If nothing is kept, the next stage acknowledges each micro-batch, so that a fast stage cannot flood
        a slow one.
        """
        results: list[list[Tensor]] = []
        acknowledged = 0
        acknowledges = keep == "nothing" and self.downstream is not None
        self.recorder.clear()
        self.stage.clear()
        for number, job in enumerate(jobs):
            while acknowledges and number - acknowledged >= EVALUATION_WINDOW:
                self._take(self.downstream, ())
                acknowledged += 1
            started = self._start("F", number)
            with profiled("forward", number):
                outputs = self._forward(number, job, keep)
            if self.downstream is None:
                results.append(outputs)
            self.recorder.add("F", number, started, time.perf_counter())
        while acknowledges and acknowledged < len(jobs):
            self._take(self.downstream, ())
            acknowledged += 1
        return results

    def backwards(
        self,
        jobs: Sequence[MicroBatchJob],
        gradients: Sequence[Sequence[Tensor | None]],  # of each micro-batch's results, on the last stage
        *,
        again: bool,  # these forwards will have another backward
        before_last: Callable[[], Callable[[], None]],  # returns what to call after the last backward
    ) -> None:
        """Run all backwards of the held forwards. Recompute first if only inputs were kept."""
        last = max((n for n, job in enumerate(jobs) if job.microbatch.size), default=-1)
        for number, job in enumerate(jobs):
            if self.stage.held[number].trains and not self.stage.held[number].edges:
                started = self._start("R", number)
                with profiled("recompute", number):
                    self.stage.recompute(number)
                self.recorder.add("R", number, started, time.perf_counter())
            started = self._start("B", number)
            if self.downstream is None:
                incoming = gradients[number]
            else:
                incoming = self._take(self.downstream, self._returned(number, job))
            stop = before_last() if number == last else None
            try:
                with profiled("backward", number):
                    self._send(self.upstream, self.stage.backward(number, incoming, again=again))
            finally:
                if stop is not None:
                    stop()
            self.recorder.add("B", number, started, time.perf_counter())

    def _returned(self, number: int, job: MicroBatchJob) -> list[TensorSpec]:
        """Return the sent tensors of which the next stage returns gradients."""
        trains = self.stage.held[number].trains
        return [spec for spec in job.program.sent if spec.needs_grad] if trains else []

    def _send(self, target: AdjacentStage | None, tensors: Sequence[Tensor], *, frozen: bool = False) -> None:
        if target is None:
            return
        started = time.perf_counter() if self.records_sends else 0.0
        try:
            with profiled("send"):
                target.send(tensors, frozen=frozen)
        except PeerLost as error:
            assert self.waiter is not None, "a pipeline of one stage has no peer to lose"
            self.waiter.raise_cause(error)
        if self.records_sends and self.device.type == "cpu":
            self.recorder.add("send", -1, started, time.perf_counter())

    def _take_from(self, source: AdjacentStage) -> list[Tensor]:
        try:
            return source.take()
        except PeerLost as error:
            assert self.waiter is not None, "a pipeline of one stage has no peer to lose"
            self.waiter.raise_cause(error)

    def _take(self, source: AdjacentStage | None, expected: Sequence[TensorSpec]) -> list[Tensor]:
        if source is None:
            return []
        if source.ready == 0:
            assert self.waiter is not None
            self.waiter.until(
                lambda: source.ready > 0 or source.over,
                lambda: f"{self.where}: a message from rank {source.peer}",
            )
        tensors = self._take_from(source)
        check_arrival(tensors, expected, source.peer)
        return tensors

    def _wait_for(self, cursor: Cursor, activations: int, gradients: int) -> None:
        """Wait until one more activation or gradient is ready than these."""
        assert self.waiter is not None, "a pipeline of one stage has nothing to wait for"
        started = time.perf_counter()
        both = ((self.upstream, activations), (self.downstream, gradients))
        peers = [(peer, known) for peer, known in both if peer is not None]

        def description() -> str:
            kind, number = cursor.waiting_for()
            peer = self.upstream if kind == "activation" else self.downstream
            return f"{kind} {number} of rank {peer.peer if peer else '?'}"

        with profiled("wait"):
            self.waiter.until(
                lambda: any(peer.ready > known or peer.over for peer, known in peers), description
            )
        for peer, known in peers:
            if peer.over and peer.ready <= known:
                self._take_from(peer)  # raises: the peer has ended too early
        self.recorder.add("wait", -1, started, time.perf_counter())

    def _start(self, op: Op, number: int) -> float:
        """Note the current operation for errors and return the time. Cheaper than a context manager."""
        self.where = f"stage {self.index}, micro-batch {number}, {VERBS[op]}"
        started = time.perf_counter()
        if self.delay is not None:
            time.sleep(self.delay(op, number))
        return started

    def _weighted_sum(self, losses: HostCopy | None, jobs: Sequence[MicroBatchJob]) -> float:
        """Return the sum in double precision, with one wait for the device; 0 if the stage has no loss."""
        if losses is None:
            return 0.0
        values = losses.numbers(self.waiter)
        return sum(value * job.microbatch.weight for value, job in zip(values, jobs, strict=True))


def check_arrival(tensors: Sequence[Tensor], expected: Sequence[TensorSpec], rank: int) -> None:
    """Raise if an adjacent stage sends other tensors than the plan expects."""
    for tensor, spec in zip(tensors, expected, strict=False):
        if str(tensor.dtype)[6:] != spec.dtype or tensor.dim() != len(spec.dims):
            raise VarunaError(
                f"rank {rank} sent {str(tensor.dtype)[6:]}{list(tensor.shape)}, this stage expects {spec} "
                "(do both run the same model, precision and micro-batch size?)"
            )
    if len(tensors) != len(expected):
        raise VarunaError(
            f"rank {rank} sent {len(tensors)} tensors, this stage expects {len(expected)}: "
            f"{', '.join(map(str, expected))} (do both run the same model?)"
        )
