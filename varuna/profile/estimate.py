"""Estimated profiles: the costs of a model, computed from its shapes, for planning without devices."""

from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import nn

from varuna.capture import Source
from varuna.measure.draft import ProfileDraft, ProfileSubject
from varuna.observe.progress_bar import capture_progress
from varuna.plan.cost.calibrate import calibrate
from varuna.plan.cost.costs import assumed_link
from varuna.plan.cost.estimate import Speed, estimate
from varuna.plan.cut.blocks import partition
from varuna.profile.description import GetBatch, ProfileBatches, describe
from varuna.types import (
    Duration,
    LinkCost,
    OptimizerCost,
    Overheads,
    PrecisionName,
    Profile,
    ReduceCost,
    Segment,
)

ADAM = OptimizerCost("AdamW", fixed_seconds=1e-4, seconds_per_element=2e-11, state_bytes_per_element=8.0)
OVERHEADS = Overheads(instruction_seconds=5e-5, step_seconds=1e-3)


def estimate_profile(
    model: nn.Module,
    get_batch: GetBatch,
    microbatch_sizes: Sequence[int],
    *,
    speed: Speed,
    within: LinkCost,
    between: LinkCost | None = None,
    precision: PrecisionName = "fp32",
    batch_dims: Mapping[str, int | None] | None = None,
    shared_weights: Sequence[tuple[str, str]] | None = None,
    optimizer: OptimizerCost = ADAM,
) -> Profile:
    """Estimate the profile of a model, which may be on `meta`, on a device with a known speed."""
    source = Source(
        model,
        batch_dims=batch_dims,
        shared_weights=shared_weights,
        precision=precision,
        partition=partition,
        watch=capture_progress(shown=True),
    )
    batches = ProfileBatches(get_batch, source)
    captured = source.capture(batches.sample, training=True)
    subject = describe(
        source,
        captured,
        sample_bytes=batches.sample_bytes,
        device=torch.device("cpu"),
        devices_per_machine=1,
    )
    return estimate_described(
        subject,
        captured.graph.segments,
        microbatch_sizes,
        speed=speed,
        within=within,
        between=between,
        optimizer=optimizer,
    )


def estimate_described(
    subject: ProfileSubject,
    segments: Sequence[Segment],
    microbatch_sizes: Sequence[int],
    *,
    speed: Speed,
    within: LinkCost,
    between: LinkCost | None = None,
    optimizer: OptimizerCost = ADAM,
) -> Profile:
    """Estimate the profile of a model from its facts and segments."""
    basis = f", with the speed of {speed.measured_on}" if speed.measured_on else ""
    draft = ProfileDraft(
        subject=msgspec.structs.replace(subject, device="estimated", device_memory_bytes=speed.memory_bytes),
        sizes=tuple(
            estimate(segments[subject.segments.index(kind)], speed, microbatch_sizes)
            for kind in range(len(subject.kinds))
        ),
        fixed_bytes=0,
        optimizer=optimizer,
        overheads=OVERHEADS,
        within=within,
        between=between,
        reductions=tuple(
            reduction
            for link, far in ((within, False), (between, True))
            if link is not None
            for reduction in assumed_reductions(link, far)
        ),
    )
    profile = draft.profile()
    assert profile is not None
    notes = (f"everything is estimated from the model's shapes{basis}",)
    return msgspec.structs.replace(profile, notes=notes)


def assumed_reductions(link: LinkCost, between: bool) -> list[ReduceCost]:
    """Return the costs of a ring of two ranks over this link: each sends half of the bytes, twice."""
    return [
        ReduceCost(2, message.num_bytes, between, Duration(message.one_way.seconds))
        for message in link.messages
    ]


__all__ = ["Speed", "assumed_link", "calibrate", "estimate_profile"]
