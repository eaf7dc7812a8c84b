"""RaNNC's face of the library: models that are split without any annotation.

The package is importable so that its name is taken and its place in the house is clear. What users
will find here is `RaNNCModule(model, optimizer)`.
"""

from typing import Never

__all__: list[str] = []


def __getattr__(name: str) -> Never:
    if name in {"RaNNCModule", "delay_grad_allreduce", "allreduce_grads"}:
        raise AttributeError(
            f"pyrannc.{name} is not there yet (until it is, mark the cuts with varuna.CutPoint "
            "or varuna.cut_after and wrap the model in varuna.Varuna)"
        )
    raise AttributeError(f"module 'pyrannc' has no attribute {name!r}")
