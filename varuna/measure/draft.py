"""A profile while it is being measured: the model's fixed facts and the costs found so far.

Each finished measurement makes a new draft, which is written to a file. A job that was killed reads the
file and measures only what is missing. This module is pure: no clock, no device, no file.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import msgspec

from varuna.types import (
    PROFILE_VERSION,
    CutCost,
    LinkCost,
    OptimizerCost,
    Overheads,
    PrecisionName,
    Profile,
    ReduceCost,
    SegmentCost,
    SizeCost,
    TieCost,
)


class SegmentKind(msgspec.Struct, frozen=True):
    """Sizes of one kind of segment that need no measurement."""

    parameter_bytes: int
    gradient_bytes: int
    num_trained: int


class ProfileSubject(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the device that a profile is about."""

    fingerprint: str
    device: str
    device_memory_bytes: int
    precision: PrecisionName
    kinds: tuple[SegmentKind, ...]
    segments: tuple[int, ...]
    cuts: tuple[CutCost, ...]
    ties: tuple[TieCost, ...]
    sample_bytes: int


class DraftNote(msgspec.Struct, frozen=True):
    """Something that was not measured, and the reason."""

    about: str
    why: str

    def __str__(self) -> str:
        return f"{self.about}: {self.why}"


class ProfileDraft(msgspec.Struct, frozen=True, kw_only=True):
    """Everything measured so far."""

    version: int = PROFILE_VERSION
    subject: ProfileSubject
    sizes: tuple[tuple[SizeCost, ...], ...]  # for each kind, in ascending order of micro-batch size
    fixed_bytes: int | None = None
    optimizer: OptimizerCost | None = None
    overheads: Overheads | None = None
    within: LinkCost | None = None
    between: LinkCost | None = None
    reductions: tuple[ReduceCost, ...] = ()
    notes: tuple[DraftNote, ...] = ()

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise ValueError(
                f"version is {self.version}, this library reads {PROFILE_VERSION} (profile the model again)"
            )

    def measured_sizes(self) -> list[int]:
        """Return the micro-batch sizes at which every kind was measured."""
        by_kind = [{cost.microbatch_size for cost in costs} for costs in self.sizes]
        return sorted(set.intersection(*by_kind)) if by_kind else []

    def missing_sizes(self, wanted: Iterable[int]) -> list[int]:
        return sorted(set(wanted) - set(self.measured_sizes()))

    def with_sizes(self, costs: Mapping[int, SizeCost]) -> Self:
        """Add the costs of some kinds; a cost at a known micro-batch size replaces the old one."""
        sizes = []
        for kind, known_costs in enumerate(self.sizes):
            known = {cost.microbatch_size: cost for cost in known_costs}
            if kind in costs:
                known[costs[kind].microbatch_size] = costs[kind]
            sizes.append(tuple(known[size] for size in sorted(known)))
        return msgspec.structs.replace(self, sizes=tuple(sizes))

    def with_note(self, about: str, why: str) -> Self:
        others = self.without_note(about).notes
        return msgspec.structs.replace(self, notes=(*others, DraftNote(about, why)))

    def without_note(self, about: str) -> Self:
        return msgspec.structs.replace(self, notes=tuple(note for note in self.notes if note.about != about))

    def profile(self) -> Profile | None:
        """Return the profile, or None while too little is measured to plan with."""
        if self.fixed_bytes is None or self.optimizer is None or self.overheads is None:
            return None
        if not self.measured_sizes():
            return None
        subject = self.subject
        return Profile(
            fingerprint=subject.fingerprint,
            device=subject.device,
            device_memory_bytes=subject.device_memory_bytes,
            precision=subject.precision,
            kinds=tuple(
                SegmentCost(sizes, kind.parameter_bytes, kind.gradient_bytes, kind.num_trained)
                for sizes, kind in zip(self.sizes, subject.kinds, strict=True)
            ),
            segments=subject.segments,
            cuts=subject.cuts,
            ties=subject.ties,
            sample_bytes=subject.sample_bytes,
            fixed_bytes=self.fixed_bytes,
            optimizer=self.optimizer,
            overheads=self.overheads,
            within=self.within,
            between=self.between,
            reductions=self.reductions,
            notes=tuple(map(str, self.notes)),
        )


def new_draft(subject: ProfileSubject) -> ProfileDraft:
    return ProfileDraft(subject=subject, sizes=((),) * len(subject.kinds))


def resume_draft(draft: ProfileDraft, subject: ProfileSubject, source: str) -> ProfileDraft:
    """Continue a draft read from `source`; raise ValueError if it is about something else."""
    check_subject(draft.subject, subject, source)
    # The facts of the model are computed again: the machine's memory may have changed.
    return msgspec.structs.replace(draft, subject=subject)


def reopen_profile(profile: Profile, subject: ProfileSubject, source: str) -> ProfileDraft:
    """Turn a finished profile into a draft, to extend it."""
    check_subject(profile, subject, source)
    notes = (note.partition(": ") for note in profile.notes)
    return ProfileDraft(
        subject=subject,
        sizes=tuple(kind.sizes for kind in profile.kinds),
        fixed_bytes=profile.fixed_bytes,
        optimizer=profile.optimizer,
        overheads=profile.overheads,
        within=profile.within,
        between=profile.between,
        reductions=profile.reductions,
        notes=tuple(DraftNote(about, why) for about, _, why in notes),
    )


def check_subject(found: ProfileSubject | Profile, expected: ProfileSubject, source: str) -> None:
    """Raise ValueError if a profile is about another model, device or precision."""
    for what, theirs, ours in (
        ("device", found.device, expected.device),
        ("precision", found.precision, expected.precision),
        ("model", found.fingerprint, expected.fingerprint),
        ("segmentation", found.segments, expected.segments),
    ):
        if theirs != ours:
            raise ValueError(
                f"{source} holds the profile of another {what}: expected {_shortened(ours)}, "
                f"found {_shortened(theirs)} (choose another out_folder, or move that file away)"
            )


def _shortened(value: str | Sequence[int]) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
