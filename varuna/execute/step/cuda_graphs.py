"""A stage that records its work as CUDA graphs and replays them, so that the host launches it with one call.

A micro-batch consists of hundreds of kernels, and a host that launches them one by one may be slower than
the device. A CUDA graph launches them all at once, but works on fixed memory:

    received, inputs ──copied──► [ recorded forward ] ──copied──► what is sent, or the loss
                                          │ activations
    gradients        ──copied──► [ recorded backward ] ──copied──► gradients of what was received
                                          └──► added to the weights' gradients, at fixed addresses

A recording serves one micro-batch at a time, from its forward to its backward. So a stage makes as many
recordings as it holds micro-batches. The first micro-batch of each form runs unrecorded; it shows the outputs
and the weights that get a gradient.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varuna.execute.step.stage import (
    HeldMicroBatch,
    IdleProgram,
    Stage,
    StageProgram,
    TensorsByName,
    leaves_of,
    or_zeros,
    outputs_with_gradient,
    pair_gradients,
)
from varuna.types import Work

log = logging.getLogger("varuna")
cuda: Any = torch.cuda  # only partly typed

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]
"""Records the device work of a function without running it, and returns a function that runs it."""
MicroBatchForm = tuple[object, ...]
"""Micro-batches of one form are the same work on other values."""
MAX_FORMS = 8
"""Recordings hold memory: only those of the most recently used forms are kept."""


def make_recorders(device: torch.device) -> Callable[[], Record] | None:
    """Return a function that makes recorders, each with its own memory; None if the device has no graphs."""
    if device.type != "cuda":
        return None
    stream = cuda.Stream(device)

    def make_recorder() -> Record:
        pool = cuda.graph_pool_handle()

        def record(function: Callable[[], None]) -> Replay:
            graph = cuda.CUDAGraph()
            cuda.synchronize(device)
            with cuda.stream(stream):
                # Other threads query their own events meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    function()
                except BaseException:
                    with suppress(RuntimeError):  # only says that there was an error
                        graph.capture_end()
                    raise
                graph.capture_end()
            replay: Replay = graph.replay
            return replay

        return record

    return make_recorder


@dataclass(frozen=True)
class KnownForm:
    """Results of the first, unrecorded run of a form."""

    program: StageProgram  # kept alive, because its id is part of the form
    results: Sequence[Tensor]  # on the meta device
    flowing: Sequence[Tensor | None]  # gradients of the results, on the meta device; None: not needed
    trained: tuple[Tensor, ...]  # the weights that got a gradient
    wants: bool  # the previous stage wants gradients


class Recording:
    """The recorded work of one micro-batch, with its memory."""

    def __init__(
        self,
        known: KnownForm,
        received: Sequence[Tensor],
        inputs: Mapping[str, object],
        work: Work,
        *,
        device: torch.device,
        run: Callable[[HeldMicroBatch], list[Tensor]],
        record: Record,
    ) -> None:
        self._run = run
        own = {name: v.clone() if isinstance(v, Tensor) else v for name, v in inputs.items()}
        received = [t.detach().clone() for t in received]
        self._held = HeldMicroBatch(known.program, received, own, work, wants=known.wants)
        self._flowing = [t if t is None else torch.empty_like(t, device=device) for t in known.flowing]
        self._results = [torch.empty_like(like, device=device) for like in known.results]
        self._outgoing = [torch.empty_like(leaf) for leaf in leaves_of(self._held)]
        self._replay_forward = record(self._forward)
        self._replay_backward = record(self._backward)

    def forward(self, received: Sequence[Tensor], inputs: Mapping[str, object]) -> list[Tensor]:
        own = [*self._held.received, *_tensors(self._held.inputs)]
        _copy(own, [*received, *_tensors(inputs)])
        self._replay_forward()
        return [result.clone() for result in self._results]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Add to the weights' gradients at the addresses of the recording."""
        pairs = [(own, g) for own, g in zip(self._flowing, gradients, strict=True) if own is not None]
        assert all(gradient is not None for _, gradient in pairs)
        _copy([own for own, _ in pairs], [g for _, g in pairs if g is not None])
        self._replay_backward()
        return [gradient.clone() for gradient in self._outgoing]

    def _forward(self) -> None:
        _copy(self._results, [output.detach() for output in self._run(self._held)])

    def _backward(self) -> None:
        roots, flowing = pair_gradients(self._held.edges, self._flowing)
        self._held.edges = []
        torch.autograd.backward(roots, flowing)
        leaves = leaves_of(self._held)
        _copy(self._outgoing, or_zeros([leaf.grad for leaf in leaves], leaves))
        for leaf in leaves:
            leaf.grad = None


@dataclass(kw_only=True)
class ObservedMicroBatch(HeldMicroBatch):
    """An unrecorded micro-batch of a form that is not known yet."""

    form: MicroBatchForm
    results: list[Tensor]
    flowing: list[Tensor | None]


@dataclass(kw_only=True)
class ReplayedMicroBatch(HeldMicroBatch):
    form: MicroBatchForm
    recording: Recording


class GraphedStage(Stage):
    """Replays what it can. Recompute, random numbers and opaque modules run unrecorded."""

    def __init__(self, state: TensorsByName, recorders: Callable[[], Record], device: torch.device) -> None:
        super().__init__(state, split_backward=False)
        self.gradients: dict[Tensor, Tensor] = {}  # by weight: its gradient at a fixed address
        self.num_recorded = 0
        self._recorders = recorders
        self._device = device
        self._known: dict[MicroBatchForm, KnownForm | None] = {}  # None: cannot be recorded
        self._free: dict[MicroBatchForm, list[Recording]] = {}
        self._weights: dict[int, list[object]] = {}  # by program: identity and address of its tensors
        self._logged: set[str] = set()
        self._checked: set[int] = set()  # programs whose weights were checked in this step

    def forward(
        self,
        microbatch: int,
        program: StageProgram,
        received: list[Tensor],
        inputs: Mapping[str, object],
        work: Work,
        *,
        keep_graph: bool = True,
        wants_gradients: bool = True,
    ) -> list[Tensor]:
        run = partial(super().forward, microbatch, program, received, inputs, work)
        options = {"keep_graph": keep_graph, "wants_gradients": wants_gradients}
        trains = self._trains(program, received, inputs, wants_gradients)
        if isinstance(program, IdleProgram) or not trains:
            return run(**options)
        obstacle = self._obstacle(program, keep_graph)
        if obstacle:
            self._log_once(obstacle)
        form = None if obstacle else self._form(program, received, inputs, wants_gradients)
        recording = None if form is None else self._recording(form, received, inputs, work)
        if recording is not None and form is not None:
            self.held[microbatch] = ReplayedMicroBatch(
                program, [], {}, work, wants=wants_gradients, form=form, recording=recording
            )
            self.most_held = max(self.most_held, len(self.held))
            return recording.forward(received, inputs)
        outputs = run(**options)
        if form is not None and form not in self._known:
            self._observe_outputs(microbatch, form, outputs)
        return outputs

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, again: bool = False
    ) -> list[Tensor]:
        held = self.held[microbatch]
        if isinstance(held, ReplayedMicroBatch):
            assert not again
            found = self._replay(held, gradients)
            self._release(self.held.pop(microbatch))
            return found
        with self._observe_weights(held):
            return super().backward(microbatch, gradients, again=again)

    def backward_inputs(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        held = self.held[microbatch]
        if isinstance(held, ReplayedMicroBatch):
            held.pending = ()
            return self._replay(held, gradients)
        with self._observe_weights(held):
            return super().backward_inputs(microbatch, gradients)

    def backward_weights(self, microbatch: int) -> None:
        held = self.held[microbatch]
        super().backward_weights(microbatch)
        self._release(held)

    def clear(self) -> None:
        for held in self.held.values():
            self._release(held)
        self._checked.clear()
        super().clear()

    def _obstacle(self, program: StageProgram, keep_graph: bool) -> str:
        """Return why micro-batches of a program cannot be recorded; empty if they can."""
        if not keep_graph:
            return "they are recomputed"
        if not program.repeats:
            return "they draw random numbers or have opaque modules"
        if id(program) not in self._checked:
            self._checked.add(id(program))
            self._check_weights(program)
        return ""

    def _log_once(self, obstacle: str) -> None:
        if obstacle not in self._logged:
            self._logged.add(obstacle)
            log.warning("micro-batches run without CUDA graphs: %s", obstacle)

    def _form(
        self, program: StageProgram, received: Sequence[Tensor], inputs: Mapping[str, object], wants: bool
    ) -> MicroBatchForm | None:
        """Return the form of a micro-batch; None if it cannot be recorded."""
        try:
            described = tuple((name, _describe(value)) for name, value in inputs.items())
            form = (id(program), tuple(map(_describe, received)), described, wants)
            return None if form in self._known and self._known[form] is None else form
        except TypeError:  # an input that is not hashable
            return None

    def _check_weights(self, program: StageProgram) -> None:
        """Forget recordings whose weights have moved. Once per step."""
        now: list[object] = [(id(t), t.data_ptr(), t.requires_grad) for t in self._tensors(program)]
        if self._weights.get(id(program), now) != now:
            for form in [form for form in self._known if form[0] == id(program)]:
                self._known.pop(form)
                self._free.pop(form, None)
        self._weights[id(program)] = now

    def _recording(
        self, form: MicroBatchForm, received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> Recording | None:
        """Return a free recording, or make one if that is possible now."""
        known = self._known.get(form)
        if known is None:
            return None
        free = self._free.pop(form, [])
        self._free[form] = free  # the most recently used form is last
        if free:
            return free.pop()
        # The backward of an unrecorded micro-batch adds to the weights' gradients on another stream.
        if not all(isinstance(held, ReplayedMicroBatch) for held in self.held.values()):
            return None
        while len(self._free) > MAX_FORMS:
            del self._free[next(iter(self._free))]
        self._fix_gradients(known.trained)
        try:
            run, record = self._run_with_graph, self._recorders()
            recording = Recording(known, received, inputs, work, device=self._device, run=run, record=record)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._log_once(f"recording failed: {error}")
            self._known[form] = None
            return None
        self.num_recorded += 1
        return recording

    def _replay(self, held: ReplayedMicroBatch, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        known = self._known[held.form]
        assert known is not None
        self._fix_gradients(known.trained)
        return held.recording.backward(gradients)

    def _release(self, held: HeldMicroBatch) -> None:
        if isinstance(held, ReplayedMicroBatch) and held.form in self._known:
            self._free.setdefault(held.form, []).append(held.recording)

    def _fix_gradients(self, weights: Sequence[Tensor]) -> None:
        """Move the weights' gradients to the addresses that recordings add to."""
        empty = []
        for weight in weights:
            gradient = self.gradients.get(weight)
            if gradient is None:
                gradient = self.gradients[weight] = torch.empty_like(weight, requires_grad=False)
            if weight.grad is None:
                empty.append(gradient)
            elif weight.grad is not gradient:
                gradient.copy_(weight.grad)
            weight.grad = gradient
        if empty:
            torch._foreach_zero_(empty)

    def _observe_outputs(self, microbatch: int, form: MicroBatchForm, outputs: Sequence[Tensor]) -> None:
        held = self.held[microbatch]
        needed = outputs_with_gradient(held.program, outputs)
        self.held[microbatch] = ObservedMicroBatch(
            **vars(held),
            form=form,
            results=[torch.empty_like(output, device="meta") for output in outputs],
            flowing=[
                None if edge is None else torch.empty_like(output, device="meta")
                for output, edge in zip(needed, held.edges, strict=True)
            ],
        )

    @contextmanager
    def _observe_weights(self, held: HeldMicroBatch) -> Iterator[None]:
        """Note which weights get a gradient in this backward."""
        if not isinstance(held, ObservedMicroBatch) or held.form in self._known:
            yield
            return
        trained: dict[Tensor, None] = {}
        weights: list[Any] = [t for t in self._tensors(held.program) if t.requires_grad and t.is_leaf]
        hooks = [w.register_post_accumulate_grad_hook(lambda w: trained.update({w: None})) for w in weights]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        has_gradient = any(like is not None for like in held.flowing)
        known = KnownForm(held.program, held.results, held.flowing, tuple(trained), held.wants)
        self._known[held.form] = known if has_gradient else None


def _describe(value: object) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride(), value.device
    hash(value)
    return type(value), value


def _tensors(inputs: Mapping[str, object]) -> list[Tensor]:
    return [value for value in inputs.values() if isinstance(value, Tensor)]


@torch.no_grad()
def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value, non_blocking=True)
