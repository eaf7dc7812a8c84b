"""Makes torch's gradient clipping use the norm of the whole model, although a rank holds one stage.

`clip_grad_norm_` and `get_total_norm` of torch.nn.utils see only this rank's tensors. `ModelNorm` registers
the parameters of a wrapped model. If a call is given one of them, all ranks exchange their norms in one small
message. Models that share an optimizer are clipped together: each exchanges its norms. Other calls run as
before. `clip_grads_with_norm_` needs no change. `clip_grad_value_` works on each element, but refuses a rank
without gradients.

torch is patched inside these functions, so that references that a script has imported before work, too.
tests/train/test_clipping.py fails when a torch release changes what the patch relies on.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakTensorKeyDictionary

from varuna.execute.comm.session import Session
from varuna.execute.device.host_copy import HostCopy
from varuna.execute.update.reduce import Reducer

Tensors = Tensor | Iterable[Tensor]
ListedNorm = tuple[list[Tensor], Tensor]
"""Parameters, and the norm of their gradients."""
NormMeasurement = Callable[[], ListedNorm]


class ModelNorm:
    """The norm over all ranks of tensors that belong to one wrapped model."""

    def __init__(self, session: Session, reducer: Reducer, parameters: Iterable[Tensor]) -> None:
        self._session = session
        self._reducer = reducer
        self._ordered = tuple(parameters)
        self._own = frozenset(self._ordered)
        self._earlier: list[frozenset[int]] = []  # identities of this model's parameters in earlier layouts
        # Runs the first function on all ranks, and again after a loss; the second one if nothing counts.
        self.repeat: Callable[[NormMeasurement, NormMeasurement], ListedNorm] = lambda measure, _: measure()
        self.is_interrupted: Callable[[], bool] = lambda: False  # by a loss; `repeat` goes on
        self._family = [weakref.ref(self)]  # this model and those that share an optimizer with it
        self._registered: Any = WeakTensorKeyDictionary()  # tensors by which a call is recognized
        self.add(self._own)
        _live.add(self)
        if session.num_ranks > 1:
            _install()

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Register more tensors by which a call is recognized: those that other ranks hold, placeholders."""
        for parameter in parameters:
            _models[parameter] = weakref.ref(self)
            self._registered[parameter] = True

    def follow(self, last: "ModelNorm") -> None:
        """Replace the norm of the last layout of the same model."""
        _live.discard(last)
        self.repeat, self.is_interrupted = last.repeat, last.is_interrupted
        self._earlier = [*last._earlier, *last.identities]
        # Also those that a layout between the two has registered, which was abandoned.
        self.add(last._registered.keys())

    @property
    def identities(self) -> list[frozenset[int]]:
        """The parameters as a script may have listed them: all of them, and those that train."""
        everything = frozenset(map(id, self._ordered))
        return [everything, frozenset(id(one) for one in self._ordered if one.requires_grad)]

    def current(self, listed: list[Tensor]) -> list[Tensor]:
        """Replace a list of all parameters in an earlier layout by those of this layout."""
        own = [one for one in listed if (known := _models.get(one)) is not None and known() is self]
        found = frozenset(id(one) for one in own if one.numel())  # without a placeholder
        if not own or found in self.identities:
            return listed
        if found in self._earlier:
            others = [one for one in listed if all(one is not other for other in own)]
            return [*(one for one in self._ordered if one.requires_grad), *others]
        if any(one not in self._own and one.numel() for one in own):
            raise RuntimeError(
                "a parameter that was passed to torch's clipping belongs to another stage since the job's "
                "layout has changed (make the list in each step: [p for p in model.parameters() if ...])"
            )
        return listed

    def join(self, other: "ModelNorm") -> None:
        """Clip the parameters of both models together. All ranks join the same models in the same order."""
        family = list(dict.fromkeys([*other._family, *self._family]))
        for member in self._members(family):
            member._family = family

    @staticmethod
    def _members(family: "Iterable[weakref.ref[ModelNorm]]") -> "list[ModelNorm]":
        return [member for reference in family if (member := reference()) is not None]

    @property
    def divided_family(self) -> "list[ModelNorm]":
        """Models of the family that one rank does not hold, in an order that is the same on all ranks."""
        return [member for member in self._members(self._family) if member.spans_ranks]

    @property
    def spans_ranks(self) -> bool:
        """True if one rank does not hold all gradients that count."""
        is_divided = self._session.depth > 1 or self._reducer.owned is not None
        return is_divided and (not self._session.closed or self.is_interrupted())

    @property
    def last_step(self) -> int:
        """A number that grows with every step of any model of this process."""
        return self._reducer.begun

    def holds_gradient(self, tensors: Sequence[Tensor]) -> bool:
        found = {id(parameter.grad) for parameter in self._own}
        return any(id(tensor) in found for tensor in tensors)

    def total(self, tensors: Sequence[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
        """Return the norm of these tensors on all ranks. All ranks call this.

        Each tied parameter counts once, each stage on one replica. Tensors that are of no divided model are
        on every rank, and count as in one process.
        """
        divided = self.divided_family
        owners = {
            id(tensor): (member, parameter)
            for member in divided
            for parameter in member._own
            for tensor in (parameter, parameter.grad)
        }
        own: dict[ModelNorm, list[Tensor]] = {member: [] for member in divided}
        foreign = list[Tensor]()
        for tensor in tensors:
            member, owner = owners.get(id(tensor), (None, None))
            if member is None or owner is None:
                registered = _models.get(tensor)
                foreign += [] if registered is not None and registered() in divided else [tensor]
            elif member._reducer.counts(owner):
                own[member].append(tensor)
        parts = [norm for member in divided for norm in member._gather(own[member], norm_type, foreach)]
        if foreign:
            parts.append(float(_plain_norm(foreign, norm_type, False, foreach)))
        norms = torch.tensor(parts, dtype=torch.float64)
        total = norms.sum() if norm_type == 0 or not parts else torch.linalg.vector_norm(norms, norm_type)
        return total.to(tensors[0]) if tensors else total.to(torch.get_default_dtype())

    def _gather(self, own: Sequence[Tensor], norm_type: float, foreach: bool | None) -> list[float]:
        """Return the norms of all ranks that have tensors of this model."""
        numbers = [0.0, 0.0]
        if own:
            norm = _plain_norm(own, norm_type, False, foreach)
            numbers = [1.0, *HostCopy(norm.double()).numbers(self._session.waiter)]
        with self._session.call("clip_grad_norm_", announce=False):
            gathered = self._session.gather_numbers(numbers)
        return [norm for is_present, norm in gathered if is_present]


_models: Any = WeakTensorKeyDictionary()  # a weak reference to the model of each registered parameter
_live = weakref.WeakSet[ModelNorm]()
_plain_norm: Callable[..., Tensor] = clip_grad._get_total_norm
_plain_clip_value: Callable[..., None] = clip_grad.clip_grad_value_


def _install() -> None:
    """Replace the functions inside `clip_grad_norm_`, `clip_grad_value_` and `get_total_norm`."""
    global _plain_norm, _plain_clip_value
    norm, clip_value = _inner(clip_grad._get_total_norm), _inner(clip_grad.clip_grad_value_)
    if norm.cell_contents is not _total_norm:
        _plain_norm, _plain_clip_value = norm.cell_contents, clip_value.cell_contents
        norm.cell_contents, clip_value.cell_contents = _total_norm, _clip_grad_value
        _inner(clip_grad.clip_grad_norm_).cell_contents = _clip_grad_norm


def _inner(function: Any) -> Any:
    """Return the cell with the function that torch's decorator calls under `no_grad`."""
    return function.__closure__[function.__code__.co_freevars.index("func")]


def _total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    model = _find_model(listed)
    if model is None:
        return _plain_norm(listed, norm_type, error_if_nonfinite, foreach)
    if model.is_interrupted():
        raise RuntimeError(
            "a rank was lost in the last step, so these gradients are not those of the next layout (call "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which follows the layout)"
        )
    return _checked(model.total(listed, float(norm_type), foreach), norm_type, error_if_nonfinite)


def _clip_grad_norm(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)

    def measure() -> ListedNorm:
        listed = given
        for live in [live for live in _live if live._earlier]:
            listed = live.current(listed)
        gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
        model = _find_model(listed)
        if model is None:
            return listed, _plain_norm(gradients, norm_type, error_if_nonfinite, foreach)
        norm = model.total(gradients, float(norm_type), foreach)
        return listed, _checked(norm, norm_type, error_if_nonfinite)

    def measure_here() -> ListedNorm:
        gradients = [parameter.grad for parameter in given if parameter.grad is not None]
        return given, _plain_norm(gradients, norm_type, False, foreach)

    model = _find_model(given)
    listed, norm = measure() if model is None else model.repeat(measure, measure_here)
    clip_grad._clip_grads_with_norm_(listed, max_norm, norm, foreach)
    return norm


def _clip_grad_value(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    is_elsewhere = any(model.spans_ranks for model in _live) and all(p.grad is None for p in listed)
    if not is_elsewhere:
        _plain_clip_value(listed, clip_value, foreach)


def _checked(norm: Tensor, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients of all ranks is {norm.item()}, so they "
            "cannot be clipped (error_if_nonfinite=False scales them anyway)"
        )
    return norm


def _find_model(tensors: Sequence[Tensor]) -> ModelNorm | None:
    """Return the model on several ranks to which any of the tensors, or of their parameters, belongs."""
    divided = [model for model in _live if model.spans_ranks]
    if not divided:
        return None
    if not tensors:  # the others may have some, of the model that has trained last, and wait for this rank
        return max(divided, key=lambda model: model.last_step)
    for tensor in tensors:
        found = _models.get(tensor)
        model = None if found is None else found()
        if model is not None:
            return next(iter(model.divided_family), None)
    return next((model for model in divided if model.holds_gradient(tensors)), None)
