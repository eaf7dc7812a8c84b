"""The file of an unfinished profile: written after each result, resumed, finished, and refused."""

from pathlib import Path

import msgspec
import pytest

from tests.measure.profiles import PROFILE_PARTS, size_cost, subject
from varuna.codec import decode
from varuna.measure.draft import ProfileDraft, new_draft
from varuna.plan.profile_file import NAME, UNFINISHED, read_profile
from varuna.profile.draft_file import DraftFile, open_draft


def new_file(folder: Path) -> DraftFile:
    return DraftFile(open_draft(folder, subject(), extends=True), folder)


def read_unfinished(folder: Path) -> ProfileDraft:
    return decode((folder / UNFINISHED).read_text(), ProfileDraft)


def test_every_addition_is_in_the_file_at_once(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    for name in ("fixed_bytes", "within", "optimizer"):
        file.add(**{name: PROFILE_PARTS[name]})
        assert read_unfinished(tmp_path) == file.draft
        assert getattr(file.draft, name) == PROFILE_PARTS[name]
    assert not (tmp_path / NAME).exists(), "not enough to plan with"


def test_a_job_killed_at_any_moment_continues_where_it_stopped(tmp_path: Path) -> None:
    """Whatever was added last is there, and nothing is missing but what was not added."""
    additions = [
        *({name: value} for name, value in PROFILE_PARTS.items()),
        *({"size": size} for size in (1, 2, 4)),
    ]
    for killed_after in range(1, len(additions) + 1):
        folder = tmp_path / str(killed_after)
        expected = new_draft(subject())
        for addition in additions[:killed_after]:
            file = DraftFile(open_draft(folder, subject(), extends=True), folder)  # a new process every time
            assert file.draft == expected
            if "size" in addition:
                size = addition["size"]
                file.add(file.draft.with_sizes({0: size_cost(size), 1: size_cost(size)}))
            else:
                file.add(**addition)
            expected = file.draft
        resumed = open_draft(folder, subject(), extends=True)
        assert resumed == expected
        sizes = [addition["size"] for addition in additions[killed_after:] if "size" in addition]
        assert resumed.missing_sizes([1, 2, 4]) == sizes, "no size is measured twice"


def test_a_draft_with_enough_becomes_a_profile_and_its_file_goes(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    file.add(**PROFILE_PARTS)
    file.add(file.draft.with_sizes({0: size_cost(2)}))
    assert (tmp_path / UNFINISHED).exists() and not (tmp_path / NAME).exists()
    file.add(file.draft.with_sizes({1: size_cost(2)}))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert read_profile(tmp_path) == file.draft.profile()
    file.add(file.draft.with_sizes({0: size_cost(4), 1: size_cost(4)}))
    assert [cost.microbatch_size for cost in read_profile(tmp_path).kinds[0].sizes] == [2, 4]


def test_a_finished_profile_is_preferred_to_an_unfinished_one(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    file.add(fixed_bytes=1)
    old = (tmp_path / UNFINISHED).read_text()
    file.add(file.draft.with_sizes({0: size_cost(2), 1: size_cost(2)}), **PROFILE_PARTS)
    (tmp_path / UNFINISHED).write_text(old)  # as if another process had been killed before it was removed
    assert open_draft(tmp_path, subject(), extends=True).fixed_bytes == PROFILE_PARTS["fixed_bytes"]


def test_measuring_again_from_the_start_reads_nothing(tmp_path: Path) -> None:
    file = new_file(tmp_path)
    file.add(**PROFILE_PARTS)
    assert open_draft(tmp_path, subject(), extends=False) == new_draft(subject())


def test_a_rank_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = DraftFile(new_draft(subject()), None)
    file.add(**PROFILE_PARTS)
    assert file.draft.optimizer == PROFILE_PARTS["optimizer"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("finished", [False, True])
def test_a_foreign_file_is_refused_with_both_fingerprints(tmp_path: Path, finished: bool) -> None:
    file = new_file(tmp_path)
    file.add(**PROFILE_PARTS)
    if finished:
        file.add(file.draft.with_sizes({0: size_cost(2), 1: size_cost(2)}))
    name = NAME if finished else UNFINISHED
    with pytest.raises(ValueError, match=rf"{name} holds .* another model: expected mine, found a model"):
        open_draft(tmp_path, subject(fingerprint="mine"), extends=True)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    new_file(tmp_path).add(fixed_bytes=1)
    found = msgspec.json.decode((tmp_path / UNFINISHED).read_bytes())
    (tmp_path / UNFINISHED).write_bytes(msgspec.json.encode({**found, "fixed_bytes": "many"}))
    with pytest.raises(ValueError, match=rf"{UNFINISHED}.*fixed_bytes"):
        open_draft(tmp_path, subject(), extends=True)
