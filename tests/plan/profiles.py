"""Profiles made by hand, of which one can tell what the best plan must be."""

from collections.abc import Sequence

from varuna.types import (
    Cluster,
    CutCost,
    Dim,
    Duration,
    LinkCost,
    Machine,
    MessageCost,
    OptimizerCost,
    Overheads,
    Profile,
    ReduceCost,
    SegmentCost,
    SizeCost,
    TieCost,
)

MB = 1 << 20
GB = 1 << 30


def segment(
    per_sample: float,
    *,
    sizes: Sequence[int] = (1, 2, 4),
    fixed: float = 0.0,  # seconds of every run, whatever its size
    parameter_bytes: int = 4 * MB,
    activation_bytes: int = MB,  # for each sample
    working_bytes: int = MB,
) -> SegmentCost:
    """A forward takes `fixed + per_sample × size`, a backward twice that, in two equal parts."""

    def size_cost(size: int) -> SizeCost:
        forward = fixed + per_sample * size
        return SizeCost(
            microbatch_size=size,
            forward=Duration(forward),
            forward_only=Duration(forward),
            backward=Duration(2 * forward),
            backward_inputs=Duration(forward),
            backward_weights=Duration(forward),
            activation_bytes=activation_bytes * size,
            working_bytes=working_bytes * size,
        )

    return SegmentCost(tuple(map(size_cost, sizes)), parameter_bytes, parameter_bytes, parameter_bytes // 4)


def link(latency: float, bytes_per_second: float, *, both: float = 1.0) -> LinkCost:
    def message(size: int) -> MessageCost:
        seconds = latency + size / bytes_per_second
        return MessageCost(size, Duration(seconds), Duration(seconds * both), 0.0, 0.0)

    return LinkCost(tuple(message(size) for size in (1 << 10, MB, 64 * MB)))


def reductions(
    bytes_per_second: float, *, between: bool, latency: float = 1e-5, groups: Sequence[int] = (2, 4, 8)
) -> tuple[ReduceCost, ...]:
    return tuple(
        ReduceCost(
            group,
            size,
            between,
            Duration(latency * group + 2 * (group - 1) / group * size / bytes_per_second),
        )
        for group in groups
        for size in (1 << 10, MB, 25 * MB, 256 * MB)
    )


FAST = link(1e-6, 100e9)
SLOW = link(1e-5, 10e9)
ADAM = OptimizerCost("AdamW", 0.0, 1e-10, 8.0)
NONE = Overheads(0.0, 0.0)


def profile(
    kinds: Sequence[SegmentCost],
    segments: Sequence[int],
    *,
    cut_bytes: int = 64 << 10,  # for each sample
    within: LinkCost | None = FAST,
    between: LinkCost | None = SLOW,
    reduce_costs: tuple[ReduceCost, ...] | None = None,
    ties: tuple[TieCost, ...] = (),
    optimizer: OptimizerCost = ADAM,
    overheads: Overheads = NONE,
    **more: object,
) -> Profile:
    cut = CutCost(Dim(cut_bytes, 0), Dim(cut_bytes, 0))
    if reduce_costs is None:
        reduce_costs = reductions(50e9, between=False) + reductions(5e9, between=True)
    return Profile(
        **{  # type: ignore[arg-type]
            "fingerprint": "by hand",
            "device": "an abacus",
            "device_memory_bytes": 80 * GB,
            "precision": "bf16",
            "kinds": tuple(kinds),
            "segments": tuple(segments),
            "cuts": (cut,) * (len(segments) - 1),
            "ties": ties,
            "sample_bytes": 1024,
            "fixed_bytes": 0,
            "optimizer": optimizer,
            "overheads": overheads,
            "within": within,
            "between": between,
            "reductions": reduce_costs,
            **more,
        }
    )


def machines(count: int, devices: int, *, memory_bytes: int = 80 * GB, **more: float) -> Cluster:
    return Cluster(
        tuple(Machine(f"node{index}", devices, memory_bytes, **more) for index in range(count))  # type: ignore[arg-type]
    )


def transformer(layers: int = 96, *, sizes: Sequence[int] = (1, 2, 4, 8, 16), width: int = 1) -> Profile:
    """An embedding, blocks, and a head with the loss: half a billion parameters in each block."""
    parameters = 1 * GB * width
    return profile(
        [
            segment(2e-4, sizes=sizes, parameter_bytes=parameters // 2, activation_bytes=16 * MB),
            segment(8e-3, sizes=sizes, fixed=1e-3, parameter_bytes=parameters, activation_bytes=256 * MB),
            segment(6e-3, sizes=sizes, parameter_bytes=parameters // 2, activation_bytes=128 * MB),
        ],
        [0, *[1] * layers, 2],
        cut_bytes=16 * MB,
        reduce_costs=reductions(150e9, between=False, groups=(2, 4, 8))
        + reductions(40e9, between=True, groups=(2, 4, 8, 16, 64)),
        between=link(2e-5, 40e9),
        within=link(5e-6, 200e9),
        ties=(TieCost((0, layers + 1), parameters // 2, parameters // 8),),
        overheads=Overheads(2e-5, 1e-3),
    )
