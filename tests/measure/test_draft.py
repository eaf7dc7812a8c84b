"""A profile while it is measured: what is missing, what is added, and what a resumed draft keeps."""

from typing import Any

import msgspec
import pytest

from tests.measure.profiles import PROFILE_PARTS, size_cost, subject
from varuna.codec import decode, encode
from varuna.measure.draft import (
    ProfileDraft,
    check_subject,
    new_draft,
    reopen_profile,
    resume_draft,
)
from varuna.types import PROFILE_VERSION


def complete_draft(sizes: tuple[int, ...] = (1, 2)) -> ProfileDraft:
    draft = new_draft(subject())
    for size in sizes:
        draft = draft.with_sizes({kind: size_cost(size, kind + 1.0) for kind in range(2)})
    return msgspec.structs.replace(draft, **PROFILE_PARTS)


def test_a_new_draft_has_nothing_and_is_no_profile() -> None:
    draft = new_draft(subject())
    assert draft.sizes == ((), ()) and draft.measured_sizes() == []
    assert draft.missing_sizes([4, 1, 2]) == [1, 2, 4]
    assert draft.profile() is None


def test_a_size_is_measured_when_every_kind_is() -> None:
    draft = new_draft(subject()).with_sizes({0: size_cost(2)})
    assert draft.measured_sizes() == [] and draft.missing_sizes([2]) == [2]
    draft = draft.with_sizes({1: size_cost(2)})
    assert draft.measured_sizes() == [2] and draft.missing_sizes([1, 2, 4]) == [1, 4]


def test_sizes_are_kept_in_order_whatever_order_they_come_in() -> None:
    draft = new_draft(subject())
    for size in (8, 1, 4):
        draft = draft.with_sizes({0: size_cost(size), 1: size_cost(size)})
    assert [[cost.microbatch_size for cost in costs] for costs in draft.sizes] == [[1, 4, 8]] * 2


def test_a_size_measured_again_replaces_the_old_cost() -> None:
    draft = new_draft(subject()).with_sizes({0: size_cost(2, 1.0)}).with_sizes({0: size_cost(2, 5.0)})
    assert draft.sizes[0] == (size_cost(2, 5.0),)


def test_adding_leaves_the_old_draft_as_it_was() -> None:
    before = new_draft(subject())
    before.with_sizes({0: size_cost(2)})
    before.with_note("links", "assumed")
    assert before == new_draft(subject())


def test_there_is_one_note_about_each_thing() -> None:
    draft = new_draft(subject()).with_note("size 8", "no memory").with_note("links", "assumed")
    draft = draft.with_note("size 8", "no time")
    assert [str(note) for note in draft.notes] == ["links: assumed", "size 8: no time"]
    assert [note.about for note in draft.without_note("links").notes] == ["size 8"]
    assert draft.without_note("unknown") == draft


@pytest.mark.parametrize("missing", ["fixed_bytes", "optimizer", "overheads"])
def test_a_profile_needs_every_part(missing: str) -> None:
    assert complete_draft().profile() is not None
    assert msgspec.structs.replace(complete_draft(), **{missing: None}).profile() is None


def test_links_and_reductions_may_be_missing_from_a_profile() -> None:
    draft = msgspec.structs.replace(complete_draft(), within=None, between=None, reductions=())
    profile = draft.profile()
    assert profile is not None and profile.within is None and profile.reductions == ()


def test_a_profile_holds_what_was_measured_and_what_is_known_of_the_model() -> None:
    profile = complete_draft().with_note("size 8", "no memory").profile()
    assert profile is not None
    assert [kind.sizes for kind in profile.kinds] == [
        (size_cost(1, 1.0), size_cost(2, 1.0)),
        (size_cost(1, 2.0), size_cost(2, 2.0)),
    ]
    assert [(kind.parameter_bytes, kind.num_trained) for kind in profile.kinds] == [(400, 100), (800, 200)]
    assert (profile.fingerprint, profile.device, profile.segments) == ("a model", "a device", (0, 1, 1))
    assert profile.optimizer == PROFILE_PARTS["optimizer"] and profile.notes == ("size 8: no memory",)


def test_a_finished_profile_becomes_the_same_draft_again() -> None:
    draft = complete_draft().with_note("size 8", "out of memory (why: it is full)")
    profile = draft.profile()
    assert profile is not None
    assert reopen_profile(profile, subject(), "profile.json") == draft


def test_a_draft_survives_its_file() -> None:
    draft = complete_draft().with_note("between", "all processes ran on one machine")
    assert decode(encode(draft), ProfileDraft) == draft


def test_a_draft_of_another_version_is_refused() -> None:
    text = encode(new_draft(subject())).replace(f'"version":{PROFILE_VERSION}', '"version":9')
    text = text.replace(f'"version": {PROFILE_VERSION}', '"version": 9')
    with pytest.raises(ValueError, match="version is 9, this library reads 1"):
        decode(text, ProfileDraft)


def test_a_resumed_draft_keeps_its_costs_and_takes_the_new_facts() -> None:
    more_memory = subject(device_memory_bytes=1 << 40)
    resumed = resume_draft(complete_draft(), more_memory, "draft.json")
    assert resumed.subject.device_memory_bytes == 1 << 40
    assert resumed.sizes == complete_draft().sizes and resumed.optimizer == PROFILE_PARTS["optimizer"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "another"}, "another model: expected a model, found another"),
        ({"device": "NVIDIA Abacus"}, "another device: expected a device, found NVIDIA Abacus"),
        ({"precision": "bf16"}, "another precision: expected fp32, found bf16"),
        ({"segments": (0, 0, 1)}, r"another segmentation: expected \(0, 1, 1\), found \(0, 0, 1\)"),
    ],
)
def test_a_foreign_draft_is_refused_with_both_values_and_a_remedy(changes: Any, message: str) -> None:
    foreign = msgspec.structs.replace(complete_draft(), subject=subject(**changes))
    with pytest.raises(ValueError, match=rf"draft\.json holds the profile of {message} .*another out_folder"):
        resume_draft(foreign, subject(), "draft.json")
    profile = foreign.profile()
    assert profile is not None
    with pytest.raises(ValueError, match=message):
        reopen_profile(profile, subject(), "draft.json")


def test_a_long_difference_is_shortened() -> None:
    long = subject(segments=tuple(range(100)))
    with pytest.raises(ValueError) as refused:
        check_subject(long, subject(), "draft.json")
    assert "..." in str(refused.value) and len(str(refused.value)) < 300
