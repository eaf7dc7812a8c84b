"""Pipeline and data parallel training for PyTorch, with the results of one process in every layout.

Names are imported when they are first used. So `import varuna` is fast and has no side effects, and the
command line, the planner and the manager need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from varuna.capture import CutPoint, cut_after, opaque, plain_randomness
    from varuna.morph.metrics.log import log
    from varuna.plan.search.auto_config import AutoConfig
    from varuna.profile.profiler import Profiler
    from varuna.train.data import SampleOrder
    from varuna.train.loader import DataLoader
    from varuna.train.notify import notify_manager_preempt
    from varuna.train.saving.checkpoints import newest_checkpoint
    from varuna.train.varuna import Varuna, get_this_rank_config_varuna, get_varuna_config
    from varuna.train.wrap import wrap
    from varuna.verification.verify import verify

__version__ = "0.1.0"

__all__ = [
    "AutoConfig",
    "CutPoint",
    "DataLoader",
    "Profiler",
    "SampleOrder",
    "Varuna",
    "cut_after",
    "get_this_rank_config_varuna",
    "get_varuna_config",
    "log",
    "newest_checkpoint",
    "notify_manager_preempt",
    "opaque",
    "plain_randomness",
    "verify",
    "wrap",
]

_HOMES = {
    "AutoConfig": "varuna.plan.search.auto_config",
    "CutPoint": "varuna.capture",
    "DataLoader": "varuna.train.loader",
    "Profiler": "varuna.profile.profiler",
    "SampleOrder": "varuna.train.data",
    "Varuna": "varuna.train.varuna",
    "cut_after": "varuna.capture",
    "get_this_rank_config_varuna": "varuna.train.varuna",
    "get_varuna_config": "varuna.train.varuna",
    "log": "varuna.morph.metrics.log",
    "newest_checkpoint": "varuna.train.saving.checkpoints",
    "notify_manager_preempt": "varuna.train.notify",
    "opaque": "varuna.capture",
    "plain_randomness": "varuna.capture",
    "verify": "varuna.verification.verify",
    "wrap": "varuna.train.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'varuna' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found  # later uses do not call this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
