"""A profile while it is being measured: what is known of the model, and what has been found so far.

Every item that is finished makes a new draft, which is written down; a job that was killed reads it
and goes on with what is missing. Pure: no clock, no device, no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


class Kind(msgspec.Struct, frozen=True):
    """What needs no stopwatch of a kind of segment."""

    parameter_bytes: int
    gradient_bytes: int
    num_trained: int


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Who is measured, and on what."""

    fingerprint: str
    device: str
    device_memory_bytes: int
    precision: PrecisionName
    kinds: tuple[Kind, ...]
    segments: tuple[int, ...]
    cuts: tuple[CutCost, ...]
    ties: tuple[TieCost, ...]
    sample_bytes: int


class Note(msgspec.Struct, frozen=True):
    """Why something was not measured."""

    about: str
    why: str

    def __str__(self) -> str:
        return f"{self.about}: {self.why}"


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    version: int = PROFILE_VERSION
    subject: Subject
    sizes: tuple[tuple[SizeCost, ...], ...]  # of each kind, ascending
    fixed_bytes: int | None = None
    optimizer: OptimizerCost | None = None
    overheads: Overheads | None = None
    within: LinkCost | None = None
    between: LinkCost | None = None
    reductions: tuple[ReduceCost, ...] = ()
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise ValueError(
                f"version is {self.version}, this library reads {PROFILE_VERSION} (profile the model again)"
            )

    # ------------------------------------------------------------ what is there

    def measured_sizes(self) -> list[int]:
        """Those at which every kind has been run."""
        found = [{cost.microbatch_size for cost in costs} for costs in self.sizes]
        return sorted(set.intersection(*found)) if found else []

    def missing_sizes(self, wanted: Iterable[int]) -> list[int]:
        return sorted(set(wanted) - set(self.measured_sizes()))

    # ------------------------------------------------------------ what comes

    def with_sizes(self, found: Mapping[int, SizeCost]) -> Draft:
        """More of some kinds, at a micro-batch size of theirs."""
        sizes = []
        for kind, costs in enumerate(self.sizes):
            known = {cost.microbatch_size: cost for cost in costs}
            if kind in found:
                known[found[kind].microbatch_size] = found[kind]
            sizes.append(tuple(known[size] for size in sorted(known)))
        return msgspec.structs.replace(self, sizes=tuple(sizes))

    def with_note(self, about: str, why: str) -> Draft:
        others = self.without_note(about).notes
        return msgspec.structs.replace(self, notes=(*others, Note(about, why)))

    def without_note(self, about: str) -> Draft:
        return msgspec.structs.replace(self, notes=tuple(note for note in self.notes if note.about != about))

    # ------------------------------------------------------------ what it becomes

    def profile(self) -> Profile | None:
        """The whole, once there is enough of it to plan with."""
        if not self.measured_sizes() or None in (self.fixed_bytes, self.optimizer, self.overheads):
            return None
        assert self.fixed_bytes is not None and self.optimizer is not None and self.overheads is not None
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


def new_draft(subject: Subject) -> Draft:
    return Draft(subject=subject, sizes=((),) * len(subject.kinds))


def resumed(draft: Draft, subject: Subject, source: str) -> Draft:
    """A draft that was read, for the model and device at hand; refused where it is another's."""
    refuse_foreign(draft.subject, subject, source)
    # What follows from the model is told anew; memory may have been added.
    return msgspec.structs.replace(draft, subject=subject)


def reopened(profile: Profile, subject: Subject, source: str) -> Draft:
    """A finished profile, to be extended."""
    refuse_foreign(profile, subject, source)
    notes = (note.partition(": ") for note in profile.notes)
    return Draft(
        subject=subject,
        sizes=tuple(kind.sizes for kind in profile.kinds),
        fixed_bytes=profile.fixed_bytes,
        optimizer=profile.optimizer,
        overheads=profile.overheads,
        within=profile.within,
        between=profile.between,
        reductions=profile.reductions,
        notes=tuple(Note(about, why) for about, _, why in notes),
    )


def refuse_foreign(found: Subject | Profile, wanted: Subject, source: str) -> None:
    """Times of another model, device or precision would be worse than none."""
    for what, theirs, ours in (
        ("device", found.device, wanted.device),
        ("precision", found.precision, wanted.precision),
        ("model", found.fingerprint, wanted.fingerprint),
        ("segmentation", found.segments, wanted.segments),
    ):
        if theirs != ours:
            raise ValueError(
                f"{source} holds the profile of another {what}: {_short(theirs)}, not {_short(ours)} "
                "(give another out_folder, or move that file away)"
            )


def _short(value: str | Sequence[int]) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
