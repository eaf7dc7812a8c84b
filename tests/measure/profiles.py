"""Hand-made parts of profiles."""

from typing import Any

from varuna.measure.draft import ProfileSubject, SegmentKind
from varuna.types import (
    CutCost,
    Dim,
    Duration,
    LinkCost,
    MessageCost,
    OptimizerCost,
    Overheads,
    ReduceCost,
    SizeCost,
)


def size_cost(size: int, seconds: float = 1.0, *, num_bytes: int = 1000) -> SizeCost:
    """The cost of a segment whose time and bytes grow with the micro-batch size."""
    return SizeCost(
        microbatch_size=size,
        forward=Duration(seconds * size, 0.1),
        forward_only=Duration(0.9 * seconds * size, 0.1),
        backward=Duration(2 * seconds * size, 0.1),
        backward_inputs=Duration(seconds * size, 0.1),
        backward_weights=Duration(seconds * size, 0.1),
        activation_bytes=num_bytes * size,
        working_bytes=num_bytes * size // 2,
    )


def subject(**changes: Any) -> ProfileSubject:
    """Three segments of two kinds."""
    facts: dict[str, Any] = {
        "fingerprint": "a model",
        "device": "a device",
        "device_memory_bytes": 1 << 30,
        "precision": "fp32",
        "kinds": (SegmentKind(400, 400, 100), SegmentKind(800, 800, 200)),
        "segments": (0, 1, 1),
        "cuts": (CutCost(Dim(64, 0), Dim(64, 0)),) * 2,
        "ties": (),
        "sample_bytes": 16,
    }
    return ProfileSubject(**(facts | changes))


MESSAGE = MessageCost(4096, Duration(1e-4), Duration(2e-4), 1e-5, 1e-5)
PROFILE_PARTS: dict[str, Any] = {
    "fixed_bytes": 1 << 20,
    "optimizer": OptimizerCost("Adam", 1e-4, 1e-9, 8.0),
    "overheads": Overheads(1e-5, 1e-4),
    "within": LinkCost((MESSAGE,)),
    "between": None,
    "reductions": (ReduceCost(2, 64, False, Duration(1e-4)),),
}
