"""RaNNC's face of the library: models that are split without any annotation.

    model = pyrannc.RaNNCModule(model, optimizer)

Importing does nothing: torch is imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyrannc.functions import barrier, get_rank, get_world_size, show_deployment
    from pyrannc.module import RaNNCModule
    from pyrannc.rehearsing import dry_run
    from pyrannc.switches import delay_grad_allreduce, keep_graph, sync_params_on_init

_HOMES = {
    "RaNNCModule": "module",
    "barrier": "functions",
    "delay_grad_allreduce": "switches",
    "dry_run": "rehearsing",
    "get_rank": "functions",
    "get_world_size": "functions",
    "keep_graph": "switches",
    "show_deployment": "functions",
    "sync_params_on_init": "switches",
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
