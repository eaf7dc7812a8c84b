"""Notices that a script's own loss computes something else than when it was captured.

A captured loss keeps the Python values that it reads, such as `self.state.global_step`. So the script's code
runs again for each batch, on tensors without values, and its operations are compared with the first ones.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from varuna.capture.model.tied_weights import named_tensors
from varuna.capture.trace.refusals import model_line
from varuna.execute.update.initial_values import hash_tensor
from varuna.hf.trainer.captured_loss import ModelProxy
from varuna.hf.trainer.refusals import UnsupportedFeature

log = logging.getLogger("varuna")

ComputeLoss = Callable[[Any, dict[str, Any], Any], Tensor]


class TensorForm(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class LossOperation(NamedTuple):
    """An operation of a loss, with its numbers, and the line that calls it."""

    text: str
    line: str


class LossWatch:
    """Compares the operations of a loss with those when it was captured."""

    def __init__(self, compute_loss: ComputeLoss) -> None:
        self._compute_loss = compute_loss
        self._mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
        )  # with it, tensor.item() returns a symbol
        self._inputs: Any = None  # forms, of the last captured call
        self._num_items: Any = None
        self._outputs: list[Any] = []  # of each call of the model
        self._is_started = False
        self._is_checked = True
        self._first: dict[bool, list[LossOperation]] = {}  # by whether the model trains

    def begin(self, inputs: Mapping[str, Any], num_items: Any) -> None:
        """Keep the form of the inputs of a captured call. Later captures are of other lengths."""
        if self._is_started:
            return
        self._inputs, self._num_items, self._outputs = _form(dict(inputs)), _form(num_items), []

    def add_outputs(self, outputs: Any) -> None:
        """Keep the form of the outputs of the model in this call."""
        if not self._is_started:
            self._outputs.append(_form(outputs))

    def start(self, model: nn.Module) -> None:
        """Keep the operations that the loss has in training, just after the capture."""
        if self._is_started:
            return
        self._is_started, was_training = True, model.training
        model.train()
        try:
            self._keep_first(model)
        finally:
            model.train(was_training)

    def _keep_first(self, model: nn.Module) -> None:
        try:
            self._first[model.training] = self._operations(model)
        except UnsupportedFeature:
            raise
        except Exception as error:
            self._is_checked = False
            log.warning(
                "compute_loss cannot be run on tensors without values (%s: %s), so it is not checked whether "
                "it reads Python values that change: a captured loss keeps the first ones",
                type(error).__name__,
                error,
            )

    def check(self, model: nn.Module) -> None:
        """Raise UnsupportedFeature if the loss has other operations than when it was captured.

        That of evaluations is captured when it is first used.
        """
        if not self._is_checked:
            return
        if (first := self._first.get(model.training)) is None:
            self._keep_first(model)
            return
        now = self._operations(model)
        nothing = LossOperation("nothing", "")
        for number in range(max(len(first), len(now))):
            before = first[number] if number < len(first) else nothing
            after = now[number] if number < len(now) else nothing
            if before.text != after.text:
                raise UnsupportedFeature(
                    f"{after.line or before.line}: the loss computes {after.text}, but {before.text} when it "
                    "was captured: it reads a Python value that changes, such as self.state.global_step, and "
                    "a captured loss keeps the first one (override _prepare_inputs to add the value to the "
                    "batch as a tensor, and take it from the inputs in compute_loss)"
                )

    def _operations(self, model: nn.Module) -> list[LossOperation]:
        """Return the operations that the loss has now."""
        recorder = OperationRecorder(model, self._mode)
        self._run(model, recorder)
        recorder.refuse_kept()  # of this run, which has ended
        return recorder.operations

    def _run(self, model: nn.Module, recorder: "OperationRecorder") -> None:
        with self._mode:
            outputs = iter([_empty(form) for form in self._outputs])
            more = _empty(self._outputs[-1]) if self._outputs else None
            inputs, num_items = _empty(self._inputs), _empty(self._num_items)
        recorder.note_made((inputs, num_items))

        def run(*args: Any, **given: Any) -> Any:
            recorder.add("the model", args, given)
            result = next(outputs, more)
            recorder.note_made(result)
            return result

        with self._mode, recorder:
            loss = self._compute_loss(ModelProxy(model, run), inputs, num_items)
        recorder.add("the loss", (loss,), {})


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Records the operations that run in it as texts, with their numbers and the values of constants.

    The tensors have no values: keeping one, or what `item()` returns, is refused.
    """

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[LossOperation] = []
        self._model = model
        self._mode = mode
        self._made: list[tuple[weakref.ref[Tensor], str]] = []  # with the line
        self._reads: list[tuple[set[Any], str]] = []  # symbols of values that item() returned
        self._used: set[Any] = set()  # symbols in arguments of operations
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets its id

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        given = [value for value in leaves if isinstance(value, FakeTensor)]
        if any(value.fake_mode is not self._mode for value in given):
            raise UnsupportedFeature(
                f"{_script_line()}: the loss uses a tensor that it has made in an earlier call, when it was "
                "captured, so it has no values (make it before training, for example in __init__)"
            )
        for value in leaves:
            self._used |= _symbols(value)
        self.add(str(function), args, kwargs or {})
        result = function(*args, **(kwargs or {}))
        self.note_made(result)
        if function is torch.ops.aten._local_scalar_dense.default:
            self._reads.append((_symbols(result), _script_line()))
        return result

    def add(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        parts = [*map(self._text, args), *(f"{key}={self._text(kwargs[key])}" for key in sorted(kwargs))]
        mode = "" if torch.is_grad_enabled() else " without gradients"
        self.operations.append(LossOperation(f"{name}({', '.join(parts)}){mode}", _script_line()))

    def note_made(self, values: Any) -> None:
        """Note tensors without values, which must not outlive the loss."""
        found = [value for value in pytree.tree_leaves(values) if isinstance(value, FakeTensor)]
        self._made += [(weakref.ref(value), _script_line()) for value in found]

    def refuse_kept(self) -> None:
        """Raise UnsupportedFeature if the script has kept a tensor or its value, for example to log it."""
        self._kept.clear()
        lines = [line for symbols, line in self._reads if symbols - self._used]
        lines += [line for made, line in self._made if made() is not None]
        if lines:
            raise UnsupportedFeature(
                f"{lines[0]}: compute_loss keeps a value, but it runs only once, to be captured, on tensors "
                "without values (keep values in evaluations only: `if not model.training:`)"
            )

    def _text(self, value: Any) -> str:
        return str(pytree.tree_map(self._leaf, value))

    def _leaf(self, value: Any) -> str:
        if not isinstance(value, Tensor):
            plain = isinstance(value, int | float | complex | str | None | torch.dtype | torch.device)
            return str(value) if plain else type(value).__name__
        if id(value) not in self._names:
            self._kept.append(value)
            self._names[id(value)] = f"tensor {len(self._kept)}"
        kind = f"{value.dtype} {tuple(value.shape)}"
        if isinstance(value, FakeTensor):
            return f"{self._names[id(value)]} {kind}"
        if value.is_meta or id(value) in self._weights:
            return f"weight {kind}"
        with _disable_current_modes():
            return f"constant {kind} {hash_tensor(value).hex()}"

    @cached_property
    def _weights(self) -> set[int]:
        """The weights of the model, which change in each step."""
        return set(map(id, named_tensors(self._model).values()))


def _script_line() -> str:
    """Return the script's line that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return model_line(frame)


def _symbols(value: Any) -> set[Any]:
    """Return the symbols of a number that was read from a tensor without values."""
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return set(value.node.expr.free_symbols) if isinstance(value, kinds) else set()


def _form(value: Any) -> Any:
    """Return a value with forms in place of its tensors, and numbers in place of symbols."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return TensorForm(tuple(map(_number, value.shape)), value.dtype, value.device)
        return _number(value)

    return pytree.tree_map(leaf, value)


def _number(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt | torch.SymFloat) else size


def _empty(form: Any) -> Any:
    """Return a value with tensors of these forms."""

    def leaf(form: Any) -> Any:
        if not isinstance(form, TensorForm):
            return form
        return torch.empty(form.shape, dtype=form.dtype, device=form.device)

    return pytree.tree_map(leaf, form, is_leaf=lambda form: isinstance(form, TensorForm))
