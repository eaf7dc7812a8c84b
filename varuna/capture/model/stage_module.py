"""The modules of the original model with the tensors of one stage, for scripts that look into the model."""

from typing import Any, NoReturn

from torch import nn

from varuna.capture.model.copies import meta_copy
from varuna.capture.model.source import Source
from varuna.capture.model.state import StageState


class StageModule(nn.Module):
    """Holds the modules in `.module`, as wrappers such as DistributedDataParallel do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> None:
        _refuse_call()


def stage_module(source: Source, state: StageState) -> StageModule:
    """Copy the model's modules and plain attributes; use the stage's own tensors, and None for all others.

    So freezing, hooks and values that a script sets on a parameter apply to the one that trains. Changes of
    a module would have no effect, since a captured program trains: they are refused.
    """
    module = meta_copy(source.meta_model)
    own = dict(state.named_parameters(remove_duplicate=False))
    buffers = dict(state.named_buffers(remove_duplicate=False))
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name in part._parameters:
            part._parameters[name] = own.get(prefix + name)
        for name in part._buffers:
            part._buffers[name] = buffers.get(prefix + name)
    module.forward = _refuse_call
    found = StageModule(module)
    kinds = {kind: _fixed(kind) for kind in {type(part) for part in found.modules()}}
    for part in found.modules():
        part.__class__ = kinds[type(part)]
    return found


def _fixed(kind: type[nn.Module]) -> Any:
    """Return a subclass whose modules cannot be changed."""
    changes = [name for name in dir(nn.Module) if name.startswith("register_")]
    changes += ["__setattr__", "__delattr__", "_apply", "add_module", "train"]
    return type(kind.__name__, (kind,), {name: _refuse_change for name in changes})


def _refuse_change(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError(
        "a change of this module would have no effect on the training, which runs a captured program (set "
        "attributes on the wrapped model or on your own model; use train(), eval() and to() of the wrapped "
        "model itself; parameters may be changed in place)"
    )


def _refuse_call(*args: object, **kwargs: object) -> NoReturn:
    raise RuntimeError(
        "this is the part of the model that one stage holds, and cannot be called: use "
        "`loss, overflow = model.step(inputs)` to train and `loss = model.evaluate(inputs)` to evaluate"
    )
