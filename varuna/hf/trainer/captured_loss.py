"""The loss of a Trainer as the forward of its model, so that `compute_loss` is captured with it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, Self

import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn

ALL_OUTPUTS = "varuna_all_outputs"
"""An input that asks for the outputs of the model itself."""
NUM_BATCHES = "varuna_num_batches"
"""An input: the number of accumulated batches that the loss is divided by."""
NUM_ITEMS = "num_items_in_batch"

ComputeLoss = Callable[[Any, dict[str, Any], Any], Tensor]
"""Called with the model, its inputs and the number of items, as `Trainer.compute_loss`."""


class ModelProxy:
    """Stands for a model: calls run `run`; attributes and the class are the model's."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        self.__dict__.update(_model=model, _run=run)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self.__dict__["_run"](*args, **inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.__dict__["_model"])


class LossObserver(Protocol):
    """Sees the inputs of captured losses, and the outputs of their models."""

    def begin(self, inputs: Mapping[str, Any], num_items: Any) -> None: ...

    def add_outputs(self, outputs: Any) -> None: ...


class LossPrecision:
    """Computes a loss in float32 around a model that computes in autocast, as accelerate does.

    Within the block, autocast is off, except in calls of the model. Their outputs are converted to float32.
    """

    def __init__(self) -> None:
        self._kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self._off = ExitStack()

    def __enter__(self) -> Self:
        for kind in self._kinds:
            self._off.enter_context(torch.autocast(kind, enabled=False))
        return self

    def __exit__(self, *_error: object) -> None:
        self._off.close()

    def call(self, forward: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """Call the model's forward in autocast."""
        self._off.close()
        outputs = forward(*args, **inputs)
        self.__enter__()
        return convert_to_fp32(outputs) if self._kinds else outputs


@contextmanager
def loss_in_forward(
    model: nn.Module, compute_loss: ComputeLoss, watch: LossObserver | None = None
) -> Iterator[None]:
    """Within the block, the model's forward computes the loss. Copies made in the block keep it."""
    original = type(model)
    # They call this model, not the copy that has them.
    patches = {
        module: vars(module).pop("forward")
        for module in model.modules()
        if "forward" in vars(module) and (module is model or package_of(vars(module)["forward"]) == "trl")
    }

    def forward(self: Any, **inputs: Any) -> Any:
        if inputs.pop(ALL_OUTPUTS, False):
            return original.forward(self, **inputs)
        num_items, num_batches = inputs.pop(NUM_ITEMS, None), inputs.pop(NUM_BATCHES, None)
        if watch is not None:
            watch.begin(inputs, num_items)
        with LossPrecision() as precision:

            def run(*args: Any, **given: Any) -> Any:
                # Not the model itself: its hooks and patches belong to the call that is running.
                outputs = precision.call(partial(original.forward, self), *args, **given)
                if watch is not None:
                    watch.add_outputs(outputs)
                return outputs

            plain = ModelProxy(self, run)
            loss = compute_loss(plain, inputs, num_items)
            return loss if num_batches is None else loss / num_batches

    members = {"forward": forward, "__module__": original.__module__, "__doc__": original.__doc__}
    model.__class__ = type(original.__name__, (original,), members)
    try:
        yield
    finally:
        model.__class__ = original
        for module, patch in patches.items():
            vars(module)["forward"] = patch


def package_of(forward: Any) -> str:
    """Return the package that has made a forward: trl's has a fused head, accelerate's has hooks."""
    code = getattr(forward, "__func__", getattr(forward, "func", forward))
    module = str(getattr(code, "__globals__", {}).get("__name__", ""))
    return module.partition(".")[0]
