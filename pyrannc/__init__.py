"""RaNNC's API: models that are partitioned without any annotation.

    model = pyrannc.RaNNCModule(model, optimizer)

Importing does nothing: torch is imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyrannc.dry_deployment import dry_run
    from pyrannc.module import RaNNCModule
    from pyrannc.process import (
        RankLost,
        barrier,
        clear,
        delay_grad_allreduce,
        get_rank,
        get_world_size,
        keep_graph,
        show_deployment,
        sync_params_on_init,
    )

__all__ = [
    "RaNNCModule",
    "RankLost",
    "barrier",
    "clear",
    "delay_grad_allreduce",
    "dry_run",
    "get_rank",
    "get_world_size",
    "keep_graph",
    "show_deployment",
    "sync_params_on_init",
]

_MODULES = {"RaNNCModule": "module", "dry_run": "dry_deployment"}  # all other names are in `process`


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pyrannc' has no attribute {name!r}")
    return getattr(import_module(f"pyrannc.{_MODULES.get(name, 'process')}"), name)
