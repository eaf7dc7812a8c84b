"""The model to verify, with its batches, its optimizer and its options."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.capture.model.batch import find_batch
from varuna.train.validate import check_model

OptimizerChoice = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Inputs = dict[str, Any]

OPTIONS = ("batch_dims", "dynamic_dims", "loss", "loss_weight", "shared_weights")
"""Arguments of `Varuna` that change what a model computes; `make` may return them."""
KEYS = ("model", "sample", "optimizer", "make_batch", *OPTIONS)
RENAMED = {"get_batch": "sample"}
"""Names that `varuna profile` uses; one `make` serves both commands."""
SMALLEST_BATCH = 4
DEFAULT_BATCH = 8


@dataclass(frozen=True)
class VerifySubject:
    """Everything that `make` returns, and the batches of all steps: the same for every layout."""

    model: nn.Module
    sample: Inputs
    batches: Sequence[Inputs]
    optimizer: OptimizerChoice
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return max(self.num_samples(batch) for batch in self.batches)

    @property
    def batch_dims(self) -> Mapping[str, int | None]:
        return self.options.get("batch_dims") or {}

    def num_samples(self, inputs: Inputs) -> int:
        return find_batch(leaves_of(inputs), self.batch_dims).size

    def rows(self, inputs: Inputs, first: int, stop: int) -> Inputs:
        """Return the samples `first` to `stop - 1` of a batch, as views."""
        return map_batched(inputs, self.batch_dims, lambda value, dim: value.narrow(dim, first, stop - first))

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if isinstance(self.optimizer, torch.optim.Optimizer):
            return self.optimizer
        try:
            inspect.signature(self.optimizer).bind(parameters)
        except TypeError as error:
            raise TypeError(
                f"the function that makes the optimizer must take parameters, as in "
                f"lambda parameters: AdamW(parameters): {error}"
            ) from None
        made = self.optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                f"the function that makes the optimizer returned a {type(made).__name__} "
                "(return a torch.optim.Optimizer)"
            )
        return made


def leaves_of(inputs: Inputs) -> dict[str, Any]:
    """Return the inputs by name; those inside of lists, tuples and dicts get names like `images_0`."""
    found: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(inputs)[0]:
        found[_name(path)] = leaf
    return found


def map_batched(
    inputs: Inputs, dims: Mapping[str, int | None], change: Callable[[Tensor, int], Tensor]
) -> Inputs:
    """Change every tensor that has a batch, given its batch dimension."""
    batch = find_batch(leaves_of(inputs), dims)
    paths, spec = pytree.tree_flatten_with_path(inputs)
    names = [(_name(path), leaf) for path, leaf in paths]
    changed = [change(leaf, batch.dims[name]) if name in batch.dims else leaf for name, leaf in names]
    made: Inputs = pytree.tree_unflatten(changed, spec)
    return made


def copied(inputs: Inputs) -> Inputs:
    """Return copies of all tensors, for a forward that may change them in place."""
    made: Inputs = pytree.tree_map_only(Tensor, Tensor.clone, inputs)
    return made


def _name(path: Sequence[Any]) -> str:
    return "_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def make_subject(made: Mapping[str, Any], *, steps: int, batch_size: int | None) -> VerifySubject:
    """Check what `make` returned, and make the batches of all steps."""
    model = made["model"]
    check_model(model)
    if unknown := [key for key in made if key not in KEYS]:
        raise TypeError(f"{', '.join(unknown)} is no option of verify (known are {', '.join(OPTIONS)})")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on `meta`, so there are no weights to train (build it on the CPU)")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("no parameter of the model has requires_grad=True, so nothing would be trained")
    optimizer = made.get("optimizer")
    optimizer = default_optimizer if optimizer is None else optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise TypeError(
            f"optimizer must be a torch optimizer of the model's parameters, or a function that makes one "
            f"from parameters, not {optimizer!r} (for example lambda parameters: AdamW(parameters, lr=1e-3))"
        )
    options = {name: made[name] for name in OPTIONS if made.get(name) is not None}
    batches = _batches(made, model, options.get("batch_dims") or {}, steps, batch_size)
    return VerifySubject(model, batches[0], batches, optimizer, options)


def _batches(
    made: Mapping[str, Any],
    model: nn.Module,
    dims: Mapping[str, int | None],
    steps: int,
    batch_size: int | None,
) -> list[Inputs]:
    make_batch, sample = made.get("make_batch"), made.get("sample")
    if make_batch is not None:
        if not callable(make_batch):
            raise TypeError(f"make_batch must be a function of the step, not a {type(make_batch).__name__}")
        batches = [named_inputs(model, make_batch(step), "make_batch") for step in range(steps)]
        if batch_size is not None:
            batches = [_first_rows(batch, dims, batch_size) for batch in batches]
    elif callable(sample):
        size = batch_size or DEFAULT_BATCH
        takes_device = "device" in inspect.signature(sample).parameters
        more = {"device": "cpu"} if takes_device else {}
        batches = [named_inputs(model, sample(size, **more), "get_batch") for _ in range(steps)]
    elif sample is None:
        raise ValueError("there are no inputs (return a sample, get_batch(size) or make_batch(step))")
    else:
        whole = named_inputs(model, sample, "the sample")
        found = find_batch(leaves_of(whole), dims).size
        if found < 1:
            raise ValueError("the sample has no rows (give inputs of a few samples)")
        size = batch_size or (found if found >= SMALLEST_BATCH else DEFAULT_BATCH)
        batches = [_rotated(whole, dims, size, step) for step in range(steps)]
    if any(find_batch(leaves_of(batch), dims).size < 1 for batch in batches):
        raise ValueError("a batch has no sample (give inputs of a few samples)")
    for name, value in leaves_of(batches[0]).items():
        if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"the input {name!r} is on {value.device}, but verify runs on the CPU (build the inputs and "
                "the model on the CPU)"
            )
    return batches


def named_inputs(model: nn.Module, inputs: object, what: str) -> Inputs:
    """Return inputs by the names of forward's arguments; positional ones get their names."""
    if isinstance(inputs, Mapping):
        return {str(name): value for name, value in inputs.items()}
    positional = (inputs,) if isinstance(inputs, Tensor) else inputs
    if not isinstance(positional, tuple | list):
        raise TypeError(
            f"{what} gave a {type(inputs).__name__}; expected the model's inputs: a dict by the names of "
            "forward's arguments, or a tuple in their order"
        )
    try:
        return dict(inspect.signature(model.forward).bind(*positional).arguments)
    except TypeError as error:
        raise TypeError(
            f"{what} gave {len(positional)} inputs, but {type(model).__name__}.forward"
            f"{inspect.signature(model.forward)} cannot be called with them: {error}"
        ) from None


def _rotated(sample: Inputs, dims: Mapping[str, int | None], size: int, step: int) -> Inputs:
    """Make a batch of a step from the rows of the sample: repeated to `size`, another first row each step."""
    rows = torch.arange(step, step + size) % find_batch(leaves_of(sample), dims).size
    return map_batched(sample, dims, lambda value, dim: value.index_select(dim, rows))


def _first_rows(inputs: Inputs, dims: Mapping[str, int | None], size: int) -> Inputs:
    found = find_batch(leaves_of(inputs), dims).size
    if found < size:
        raise ValueError(
            f"make_batch returned {found} samples, fewer than the batch size {size} (return more, or leave "
            "the batch size out)"
        )
    return map_batched(inputs, dims, lambda value, dim: value.narrow(dim, 0, size))


def in_fp64(subject: VerifySubject) -> VerifySubject:
    """Convert model and inputs to fp64, in place where possible; inputs that are one object stay one."""
    subject.model.double()
    known: dict[int, Tensor] = {}

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        if id(leaf) not in known:
            known[id(leaf)] = leaf.to(torch.complex128 if leaf.is_complex() else torch.float64)
        return known[id(leaf)]

    batches = [pytree.tree_map(wide, dict(batch)) for batch in subject.batches]
    return replace(subject, sample=pytree.tree_map(wide, dict(subject.sample)), batches=batches)


def name_results(made: object, target: str) -> dict[str, Any]:
    """Return the results of the user's `make` by name."""
    if isinstance(made, nn.Module):
        raise ValueError(
            f"{target} returned a model alone; it must return (model, sample): add inputs of a few samples"
        )
    if isinstance(made, tuple) and 2 <= len(made) <= len(KEYS):
        made = dict(zip(KEYS, made, strict=False))
    if not isinstance(made, Mapping):
        raise ValueError(
            f"{target} returned {'None' if made is None else 'a ' + type(made).__name__}; it must return "
            "(model, sample), (model, sample, optimizer), (model, sample, optimizer, make_batch), or a dict "
            f"of {', '.join(KEYS)}"
        )
    named = {RENAMED.get(str(key), str(key)): value for key, value in made.items()}
    if "model" not in named or not {"sample", "make_batch"} & {*named}:
        raise ValueError(
            f"{target} returned a dict of {', '.join(named) or 'nothing'}; it must have `model`, and "
            "`sample` or `make_batch`"
        )
    unknown = [key for key in named if key not in (*KEYS, "initialize", "message_bytes", "effort")]
    if unknown:
        raise ValueError(f"{target} returned a dict with {', '.join(unknown)}; known are {', '.join(KEYS)}")
    return {key: value for key, value in named.items() if key in KEYS}
