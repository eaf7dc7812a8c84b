"""A stage that is recorded once and replayed: the device is told a whole forward, or backward, by one word.

A micro-batch is hundreds of kernels, and a host that names them one by one may be slower than the device that
runs them. A CUDA graph names them all at once, but works on fixed memory:

    received, inputs ──copied──► [ recorded forward ] ──copied──► what is sent, or the loss
                                          │ activations
    gradients        ──copied──► [ recorded backward ] ──copied──► gradients of what was received
                                          └──► added to the weights' gradients, which lie at fixed places

A recording serves one micro-batch at a time, from its forward to its backward, so a stage makes as many as it
holds. A form of micro-batch runs unrecorded at first, which shows what it gives and which weights it trains.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varuna.execute.step.split import Pending
from varuna.execute.step.stage import (
    Held,
    Idle,
    Program,
    Stage,
    State,
    given_gradients,
    gradients_of,
    join,
    leaves_of,
)
from varuna.types import Work

log = logging.getLogger("varuna")
cuda: Any = torch.cuda  # which is typed in part only

Replay = Callable[[], None]
Tape = Callable[[Callable[[], None]], Replay]
"""Notes down what a function does on the device, without doing it; returns what does it."""
Form = tuple[object, ...]
"""Of a micro-batch: micro-batches of one form are the same work on other values."""
MOST_FORMS = 8
"""Recordings hold the memory that they work in: those of the forms used last are kept."""


def tapes_on(device: torch.device) -> Callable[[], Tape] | None:
    """Makes tapes, each with memory of its own; None: the device has none."""
    if device.type != "cuda":
        return None
    stream = cuda.Stream(device)

    def new_tape() -> Tape:
        pool = cuda.graph_pool_handle()

        def record(function: Callable[[], None]) -> Replay:
            graph = cuda.CUDAGraph()
            cuda.synchronize(device)
            with cuda.stream(stream):
                # Other threads look at events of their own meanwhile.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    function()
                except BaseException:
                    with suppress(RuntimeError):  # which only says that there was an error
                        graph.capture_end()
                    raise
                graph.capture_end()
            replay: Replay = graph.replay
            return replay

        return record

    return new_tape


@dataclass(frozen=True)
class Known:
    """What a run of a form of micro-batch has shown."""

    program: Program  # kept, for its identity is part of the form
    results: Sequence[Tensor]  # what it gives, without values
    flowing: Sequence[Tensor | None]  # the gradients that it is given, likewise; None: it needs none
    trained: tuple[Tensor, ...]  # the weights that got a gradient


class Recording:
    """One micro-batch's work, with the memory it is done in."""

    def __init__(
        self,
        known: Known,
        received: Sequence[Tensor],
        inputs: Mapping[str, object],
        work: Work,
        *,
        device: torch.device,
        run: Callable[[Held], list[Tensor]],
        tape: Tape,
    ) -> None:
        self._run = run
        own = {name: v.clone() if isinstance(v, Tensor) else v for name, v in inputs.items()}
        self._held = Held(known.program, [tensor.detach().clone() for tensor in received], own, work)
        self._flowing = [
            None if like is None else torch.empty_like(like, device=device) for like in known.flowing
        ]
        self._results = [torch.empty_like(like, device=device) for like in known.results]
        self._outgoing = [torch.empty_like(leaf) for leaf in leaves_of(self._held)]
        self._replay_forward = tape(self._forward)
        self._replay_backward = tape(self._backward)

    def forward(self, received: Sequence[Tensor], inputs: Mapping[str, object]) -> list[Tensor]:
        own = [*self._held.received, *_tensors(self._held.inputs)]
        _copy(own, [*received, *_tensors(inputs)])
        self._replay_forward()
        return [result.clone() for result in self._results]

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Adds to the weights' gradients, where they were when it was recorded."""
        pairs = [(own, g) for own, g in zip(self._flowing, gradients, strict=True) if own is not None]
        assert all(gradient is not None for _, gradient in pairs)
        _copy([own for own, _ in pairs], [gradient for _, gradient in pairs if gradient is not None])
        self._replay_backward()
        return [gradient.clone() for gradient in self._outgoing]

    def _forward(self) -> None:
        outputs = self._run(self._held)
        _copy(self._results, [output.detach() for output in outputs])

    def _backward(self) -> None:
        roots, flowing = join(self._held.edges, self._flowing)
        self._held.edges = []
        torch.autograd.backward(roots, flowing)
        leaves = leaves_of(self._held)
        _copy(self._outgoing, gradients_of([leaf.grad for leaf in leaves], leaves))
        for leaf in leaves:
            leaf.grad = None


@dataclass
class Unrecorded(Held):
    """A micro-batch that runs as ever, of a form of which nothing is known yet."""

    form: Form = ()
    results: list[Tensor] = field(default_factory=list)
    flowing: list[Tensor | None] = field(default_factory=list)


@dataclass
class Replayed(Held):
    form: Form = ()
    recording: Recording | None = None


class GraphedStage(Stage):
    """Replays what it can; recomputing, drawing, opaque modules and hooks of weights run as ever."""

    def __init__(self, state: State, tapes: Callable[[], Tape], device: torch.device) -> None:
        super().__init__(state, split_backward=False)
        self.places: dict[Tensor, Tensor] = {}  # of the weights' gradients
        self.num_recorded = 0
        self._tapes = tapes
        self._device = device
        self._known: dict[Form, Known | None] = {}  # None: cannot be recorded
        self._free: dict[Form, list[Recording]] = {}
        self._weights: dict[int, list[object]] = {}  # by program: as they were when last looked at
        self._told: set[str] = set()
        self._fit: dict[int, bool] = {}  # by program, for one step: whether its weights let it be recorded

    def forward(
        self,
        microbatch: int,
        program: Program,
        received: list[Tensor],
        inputs: Mapping[str, object],
        work: Work,
        *,
        keep_graph: bool = True,
    ) -> list[Tensor]:
        if isinstance(program, Idle):
            return super().forward(microbatch, program, received, inputs, work, keep_graph=keep_graph)
        why = self._why_not(program, keep_graph)
        if why:
            self._tell(why)
        form = None if why else self._form(program, received, inputs)
        recording = None if form is None else self._recording(form, received, inputs, work)
        if recording is not None and form is not None:
            self.held[microbatch] = Replayed(program, [], {}, work, form=form, recording=recording)
            self.most_held = max(self.most_held, len(self.held))
            return recording.forward(received, inputs)
        outputs = super().forward(microbatch, program, received, inputs, work, keep_graph=keep_graph)
        if form is not None and form not in self._known:
            self._watch(microbatch, form, outputs)
        return outputs

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor | None], *, again: bool = False
    ) -> list[Tensor]:
        held = self.held[microbatch]
        if isinstance(held, Replayed):
            assert not again
            found = self._replay(held, gradients)
            self._give_back(self.held.pop(microbatch))
            return found
        with self._noting(held):
            return super().backward(microbatch, gradients, again=again)

    def backward_inputs(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        held = self.held[microbatch]
        if isinstance(held, Replayed):
            held.pending = Pending(())
            return self._replay(held, gradients)
        with self._noting(held):
            return super().backward_inputs(microbatch, gradients)

    def backward_weights(self, microbatch: int) -> None:
        held = self.held[microbatch]
        super().backward_weights(microbatch)
        self._give_back(held)

    def clear(self) -> None:
        for held in self.held.values():
            self._give_back(held)
        self._fit.clear()
        super().clear()

    # ------------------------------------------------------------ recordings

    def _why_not(self, program: Program, keep_graph: bool) -> str:
        """Why micro-batches of a program run as ever; nothing where they need not."""
        if not keep_graph:
            return "they are recomputed"
        if not program.repeats:
            return "they draw random numbers or have opaque modules"
        if id(program) not in self._fit:
            self._fit[id(program)] = self._look_at(program)
        return "" if self._fit[id(program)] else "their weights have hooks"

    def _tell(self, why: str) -> None:
        """Once."""
        if why not in self._told:
            self._told.add(why)
            log.warning("micro-batches run without CUDA graphs, for %s", why)

    def _form(
        self, program: Program, received: Sequence[Tensor], inputs: Mapping[str, object]
    ) -> Form | None:
        """None where it cannot be recorded."""
        try:
            described = tuple((name, _describe(value)) for name, value in inputs.items())
            form = (id(program), tuple(map(_describe, received)), described)
            return None if form in self._known and self._known[form] is None else form
        except TypeError:  # a value that nobody can tell from another
            return None

    def _look_at(self, program: Program) -> bool:
        """Once a step: whether its weights are where the recordings know them, and nobody has hooked them."""
        tensors: list[Any] = self._tensors(program)
        hooked = any(t._backward_hooks or t._post_accumulate_grad_hooks for t in tensors if t.is_leaf)
        now: list[object] = [(id(t), t.data_ptr(), t.requires_grad) for t in tensors]
        if hooked or self._weights.get(id(program), now) != now:
            for form in [form for form in self._known if form[0] == id(program)]:
                self._known.pop(form)
                self._free.pop(form, None)
        self._weights[id(program)] = now
        return not hooked

    def _recording(
        self, form: Form, received: Sequence[Tensor], inputs: Mapping[str, object], work: Work
    ) -> Recording | None:
        known = self._known.get(form)
        if known is None:
            return None
        free = self._free.pop(form, [])
        self._free[form] = free  # the form used last comes last
        if free:
            return free.pop()
        # A micro-batch that runs as ever has its weights' gradients added on another stream.
        if not all(isinstance(held, Replayed) for held in self.held.values()):
            return None
        while len(self._free) > MOST_FORMS:
            del self._free[next(iter(self._free))]
        self._place(known.trained)
        try:
            recording = Recording(
                known,
                received,
                inputs,
                work,
                device=self._device,
                run=self._run_with_graph,
                tape=self._tapes(),
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._tell(f"recording one failed: {error}")
            self._known[form] = None
            return None
        self.num_recorded += 1
        return recording

    def _replay(self, held: Replayed, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        known = self._known[held.form]
        assert known is not None and held.recording is not None
        self._place(known.trained)
        return held.recording.backward(gradients)

    def _give_back(self, held: Held) -> None:
        if isinstance(held, Replayed) and held.recording is not None and held.form in self._known:
            self._free.setdefault(held.form, []).append(held.recording)
            held.recording = None

    def _place(self, weights: Sequence[Tensor]) -> None:
        """Puts gradients where the recordings add to them."""
        empty = []
        for weight in weights:
            place = self.places.get(weight)
            if place is None:
                place = self.places[weight] = torch.empty_like(weight, requires_grad=False)
            if weight.grad is None:
                empty.append(place)
            elif weight.grad is not place:
                place.copy_(weight.grad)
            weight.grad = place
        if empty:
            torch._foreach_zero_(empty)

    # ------------------------------------------------------------ what an unrecorded run shows

    def _watch(self, microbatch: int, form: Form, outputs: Sequence[Tensor]) -> None:
        held = self.held[microbatch]
        needed = given_gradients(held.program, outputs)
        self.held[microbatch] = Unrecorded(
            **vars(held),
            form=form,
            results=[torch.empty_like(output, device="meta") for output in outputs],
            flowing=[
                None if edge is None else torch.empty_like(output, device="meta")
                for output, edge in zip(needed, held.edges, strict=True)
            ],
        )

    @contextmanager
    def _noting(self, held: Held) -> Iterator[None]:
        """Which weights get a gradient in this backward."""
        if not isinstance(held, Unrecorded) or held.form in self._known:
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
        fits = any(like is not None for like in held.flowing)
        known = Known(held.program, held.results, held.flowing, tuple(trained))
        self._known[held.form] = known if fits else None


def _describe(value: object) -> object:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride(), value.device
    hash(value)
    return type(value), value


def _tensors(inputs: Mapping[str, object]) -> list[Tensor]:
    return [value for value in inputs.values() if isinstance(value, Tensor)]


@torch.no_grad()
def _copy(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value, non_blocking=True)
