"""Backward hooks of a model: a captured graph runs those of parameters, and those of opaque modules."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from varuna.capture.trace.opaque_module import is_opaque
from varuna.errors import CaptureError


class BackwardHooks:
    """Looks for backward hooks of modules, which a captured model would not call."""

    def __init__(self, model: nn.Module) -> None:
        opaque = [path for path, module in model.named_modules() if is_opaque(module)]
        self._modules = {
            path: module
            for path, module in model.named_modules()
            if not any(path == other or other == "" or path.startswith(f"{other}.") for other in opaque)
        }
        globals_ = torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks
        self._hooks: Sequence[Mapping[int, object]] = [
            *globals_,
            *(hooks for m in self._modules.values() for hooks in (m._backward_hooks, m._backward_pre_hooks)),
        ]

    def refuse(self) -> None:
        """Raise if there is any. Cheap enough for every step."""
        if not any(self._hooks):
            return
        for path, module in self._modules.items():
            if module._backward_hooks or module._backward_pre_hooks:
                name = f"the module {path!r} ({type(module).__name__})" if path else type(module).__name__
                raise CaptureError(
                    f"{name} has a backward hook (register_full_backward_hook), but a captured model does "
                    f'not call its modules. Keep the module eager with varuna.opaque(model, "{path}"): the '
                    "hook then runs for each micro-batch. Or use hooks of parameters, which run once a step."
                )
        raise CaptureError(
            "torch.nn.modules.module.register_module_full_backward_hook was called with a hook for all "
            "modules, but a captured model does not call its modules. Remove it, or use hooks of parameters."
        )


def copy_hooks(original: Tensor, copy: Tensor) -> None:
    """Register the gradient hooks of a parameter for its copy, too."""
    gradient_hooks = original._backward_hooks or {}
    later_hooks = original._post_accumulate_grad_hooks or {}
    if not gradient_hooks and not later_hooks:
        return
    trained = copy.requires_grad
    copy.requires_grad_(True)  # torch refuses hooks of frozen parameters
    for hook in gradient_hooks.values():
        copy.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in later_hooks.values():
        copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    copy.requires_grad_(trained)
