"""Decides whether differences are rounding: by the precision, and by the model's own sensitivity."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from varuna.capture.run.verify import FLOORS, NOISE_MULTIPLE, USUAL, allowed_difference
from varuna.verification.reference import KINDS, Difference
from varuna.verification.report import FirstDifference, TensorDifference

Key = tuple[int, str, str]
EXPLAINED = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass
class Tolerance:
    """Limits of rounding. `noise`: how far the last bits of the weights move each number."""

    dtype: torch.dtype
    noise: dict[Key, float] = field(default_factory=dict)
    loss_dtype: torch.dtype | None = None  # in which the model's own code computes the loss, if lower

    def floor(self, kind: str) -> float:
        """Return the share of a tensor's norm that rounding explains."""
        lower = self.loss_dtype if kind == "loss" else None
        return FLOORS[lower or self.dtype]

    def widen(self, moved: Iterable[Difference]) -> None:
        for difference in moved:
            self.noise[difference.key] = max(self.noise.get(difference.key, 0.0), difference.distance)

    def __str__(self) -> str:
        return (
            f"a tensor may differ by {FLOORS[self.dtype]:g} of its norm, which rounding in "
            f"{EXPLAINED[self.dtype]} explains, or by {NOISE_MULTIPLE:g} times the movement that the last "
            "bits of weights and inputs cause in the plain process, whichever is larger"
        )


@dataclass(frozen=True)
class Judgement:
    """Largest differences, as shares of the norm, and the first that is no rounding."""

    largest: dict[str, float]  # by kind
    tensors: tuple[TensorDifference, ...]
    first: FirstDifference | None


def judge(found: Sequence[Difference], tolerance: Tolerance, order: Mapping[str, int]) -> Judgement:
    """`order` is the place of each parameter in the model; gradients are made from the last to the first."""
    worst: dict[Key, Difference] = {}
    for difference in found:  # several ranks may hold the same tensor
        known = worst.get(difference.key)
        if known is None or not known.distance >= difference.distance:
            worst[difference.key] = difference
    gradients: dict[int, float] = {}
    for difference in worst.values():
        if difference.kind == "gradient":
            gradients[difference.step] = max(gradients.get(difference.step, 0.0), difference.norm)
    largest: dict[str, float] = {}
    tensors: dict[tuple[str, str], float] = {}  # by kind and name
    suspects: list[tuple[Difference, float]] = []
    for difference in worst.values():
        usual = USUAL * gradients[difference.step] if difference.kind == "gradient" else 0.0
        scale = max(difference.norm, usual)
        share = difference.distance / scale if scale else difference.distance
        kind, tensor = difference.kind, (difference.kind, difference.name)
        if not largest.get(kind, -1.0) >= share:  # NaN counts as the largest
            largest[kind] = share
        if not tensors.get(tensor, -1.0) >= share:
            tensors[tensor] = share
        noise = tolerance.noise.get(difference.key, 0.0)
        allowed = allowed_difference(scale, floor=tolerance.floor(difference.kind), noise=noise)
        if not difference.distance <= allowed:
            suspects.append((difference, allowed))
    listed = _by_tensor(tensors)
    if not suspects:
        return Judgement(largest, listed, None)

    def place(suspect: tuple[Difference, float]) -> tuple[int, int, int]:
        difference, _ = suspect
        number = order.get(difference.name, 0)
        return difference.step, KINDS.index(difference.kind), -number

    suspects.sort(key=place)
    difference, allowed = suspects[0]
    return Judgement(
        largest,
        listed,
        FirstDifference(
            step=difference.step,
            kind=difference.kind,
            name=difference.name,
            distance=difference.distance,
            norm=difference.norm,
            allowed=allowed,
            others=len({suspect.name for suspect, _ in suspects} - {difference.name}),
        ),
    )


def _by_tensor(shares: Mapping[tuple[str, str], float]) -> tuple[TensorDifference, ...]:
    """Return the largest differences of every parameter and buffer, the largest first."""
    found = [
        TensorDifference(name=name, kind=kind, gradient=shares.get(("gradient", name)), value=share)
        for (kind, name), share in shares.items()
        if kind in ("parameter", "buffer")
    ]
    return tuple(sorted(found, key=lambda one: -one.largest))
