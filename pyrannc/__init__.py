"""RaNNC's face of the library: models that are split without any annotation.

    model = pyrannc.RaNNCModule(model, optimizer)

Importing does nothing: torch is imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyrannc.dry_run import dry_run
    from pyrannc.module import RaNNCModule
    from pyrannc.process import (
        barrier,
        delay_grad_allreduce,
        get_rank,
        get_world_size,
        keep_graph,
        show_deployment,
        sync_params_on_init,
    )

_HOMES = {
    "RaNNCModule": "module",
    "barrier": "process",
    "delay_grad_allreduce": "process",
    "dry_run": "dry_run",
    "get_rank": "process",
    "get_world_size": "process",
    "keep_graph": "process",
    "show_deployment": "process",
    "sync_params_on_init": "process",
}

__all__ = [
    "RaNNCModule",
    "barrier",
    "delay_grad_allreduce",
    "dry_run",
    "get_rank",
    "get_world_size",
    "keep_graph",
    "show_deployment",
    "sync_params_on_init",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pyrannc' has no attribute {name!r}")
    return getattr(import_module(f"pyrannc.{_HOMES[name]}"), name)
