"""The strategies as subclasses of each installed Lightning package, registered by the name "varuna"."""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from varuna.lightning.fabric import FabricBehaviour
from varuna.lightning.trainer import TrainerBehaviour


class LightningPackage(NamedTuple):
    """A Lightning package, and the strategy for it."""

    module: str  # of the Trainer or Fabric
    fabric: str  # the Fabric package below it
    behaviour: type[Any]


STRATEGIES = {
    "VarunaStrategy": LightningPackage("lightning.pytorch", "lightning.fabric", TrainerBehaviour),
    "VarunaFabricStrategy": LightningPackage("lightning.fabric", "lightning.fabric", FabricBehaviour),
    "PytorchLightningVarunaStrategy": LightningPackage(
        "pytorch_lightning", "lightning_fabric", TrainerBehaviour
    ),
    "LightningFabricVarunaStrategy": LightningPackage(
        "lightning_fabric", "lightning_fabric", FabricBehaviour
    ),
}
"""Names in `varuna.lightning`."""


@cache
def strategy_class(name: str) -> type[Any]:
    """Return one of the strategies; its Lightning package is imported now."""
    if name not in STRATEGIES:
        raise AttributeError(f"module 'varuna.lightning' has no attribute {name!r}")
    package = STRATEGIES[name]
    base = import_module(f"{package.module}.strategies").DDPStrategy
    environments = import_module(f"{package.fabric}.plugins.environments")
    attributes = {
        "__module__": "varuna.lightning",
        "__doc__": package.behaviour.__doc__,
        "environment_base": environments.ClusterEnvironment,
    }
    if package.behaviour is TrainerBehaviour:
        tools = import_module(f"{package.module}.utilities.data")
        attributes["callback_base"] = import_module(f"{package.module}.callbacks").Checkpoint
        attributes["update_dataloader"] = staticmethod(tools._update_dataloader)
    return type(name, (package.behaviour, base), attributes)


def register() -> None:
    """Register "varuna" with the Lightning packages that are imported, or else with all installed ones."""
    roots = {package.module.partition(".")[0] for package in STRATEGIES.values()}
    wanted = {root for root in roots if root in sys.modules} or {root for root in roots if find_spec(root)}
    if not wanted:
        raise ModuleNotFoundError("varuna.lightning needs Lightning (pip install 'varuna-torch[lightning]')")
    for name, package in STRATEGIES.items():
        if package.module.partition(".")[0] in wanted:
            strategies = import_module(f"{package.module}.strategies")
            registry = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
            registry.register(
                "varuna",
                strategy_class(name),
                description="Pipeline and data parallel training over all processes",
                override=True,
            )
