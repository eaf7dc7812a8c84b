"""Broken checkpoints: they are set aside by name, and training goes on from the newest that verifies."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.checkpoint.s3 import BUCKET, S3Server
from tests.checkpoint.test_refusals import flip, state_of, train, wrap
from tests.pool import Pool
from varuna import newest_checkpoint
from varuna.checkpoint.load import (
    all_checkpoints,
    newest_complete,
    newest_whole,
    open_checkpoint,
    set_aside,
    status_of,
)
from varuna.checkpoint.store.store import Store, open_store
from varuna.errors import BrokenCheckpoint


def part(folder: Path) -> Path:
    return next(path for path in sorted(folder.glob("*.safetensors")) if path.stat().st_size)


def flip_tensor(folder: Path, kind: str) -> None:
    """Flip one bit of a tensor of this kind: "model" or "optimizer"."""
    checkpoint = open_checkpoint(open_store(str(folder.parent)), int(folder.name.split("_")[-1]))
    entry = next(entry for key, entry in checkpoint.manifest.tensors.items() if key.startswith(kind))
    flip(folder / entry.file, entry.first)


HARMS: dict[str, Callable[[Path], object]] = {
    "a bit of a weight": lambda folder: flip_tensor(folder, "model"),
    "a bit of the optimizer's state": lambda folder: flip_tensor(folder, "optimizer"),
    "a bit of the manifest": lambda folder: flip(folder / "manifest.json", 300),
    "a bit of a tree in the manifest": lambda folder: flip(folder / "manifest.json", -30),
    "an empty manifest": lambda folder: os.truncate(folder / "manifest.json", 0),
    "a cut manifest": lambda folder: os.truncate(folder / "manifest.json", 100),
    "a cut file": lambda folder: os.truncate(part(folder), part(folder).stat().st_size - 1),
    "an empty file": lambda folder: os.truncate(part(folder), 0),
    "a missing file": lambda folder: part(folder).unlink(),
}


def save_steps(store: Path | str, *steps: int) -> None:
    wrapped = wrap()
    for step in steps:
        train(wrapped, step - wrapped.iteration)
        wrapped.checkpoint(store)
    wrapped.close()


@pytest.mark.parametrize("harm", HARMS)
def test_the_newest_that_verifies_is_loaded_and_the_broken_one_set_aside(
    harm: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """REL-1: the losses go on exactly as from the older one, and the log counts the lost steps."""
    save_steps(tmp_path, 2, 5)
    HARMS[harm](tmp_path / "varuna_ckpt_5")
    reference = wrap()
    reference.load_checkpoint(tmp_path, 2)
    expected = [train(reference) for _ in range(3)]
    reference.close()
    wrapped = wrap()
    with caplog.at_level(logging.ERROR):
        assert wrapped.resume(tmp_path) == 2
    assert re.search(
        r"checkpoint 5 is broken and was set aside: .*checkpoint 2 .*3 steps are lost", caplog.text
    )
    assert list((tmp_path / "varuna_ckpt_5").glob("broken-*.txt"))
    assert newest_checkpoint(tmp_path) == 2
    assert [train(wrapped) for _ in range(3)] == expected
    wrapped.checkpoint(tmp_path)  # the same step again: it replaces the broken one
    assert newest_checkpoint(tmp_path) == 5
    assert not list((tmp_path / "varuna_ckpt_5").glob("broken-*"))
    wrapped.close()
    again = wrap()
    caplog.clear()
    assert again.resume(tmp_path) == 5
    assert "broken" not in caplog.text
    again.close()


def test_load_checkpoint_without_a_step_goes_back_too_and_again(tmp_path: Path) -> None:
    """REL-1: over several broken ones, each named."""
    save_steps(tmp_path, 1, 2, 3, 4)
    for step, harm in ((2, "a bit of a weight"), (3, "a missing file"), (4, "a bit of the manifest")):
        HARMS[harm](tmp_path / f"varuna_ckpt_{step}")
    wrapped = wrap()
    assert wrapped.load_checkpoint(tmp_path) == wrapped.iteration == 1
    wrapped.close()
    assert [one.step for one in all_checkpoints(open_store(str(tmp_path))) if one.set_aside] == [2, 3, 4]


def test_a_step_that_the_user_names_is_never_replaced(tmp_path: Path) -> None:
    """REL-1, V37: the error names what is broken and the newest whole one; nothing changes."""
    save_steps(tmp_path, 1, 2)
    HARMS["a bit of a weight"](tmp_path / "varuna_ckpt_2")
    wrapped = wrap()
    train(wrapped, 3)
    before = state_of(wrapped)
    for expected in (
        r"is damaged.*the newest complete step is 1",
        r"set aside as broken \(broken-.*step is 1",
    ):
        with pytest.raises(BrokenCheckpoint, match=expected):
            wrapped.load_checkpoint(tmp_path, 2)
    assert wrapped.iteration == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrapped.state_dict().items())
    wrapped.close()
    assert newest_checkpoint(tmp_path) == 1


def test_only_a_store_without_a_whole_checkpoint_fails_and_lists_what_was_found(tmp_path: Path) -> None:
    """REL-1: it does not start from the beginning by itself."""
    save_steps(tmp_path, 1, 2)
    HARMS["a bit of a weight"](tmp_path / "varuna_ckpt_1")
    HARMS["a cut file"](tmp_path / "varuna_ckpt_2")
    for _ in range(2):  # also once both are set aside
        wrapped = wrap()
        with pytest.raises(
            BrokenCheckpoint, match=r"checkpoint 2: .* bytes instead of.*checkpoint 1: .*damaged"
        ):
            wrapped.resume(tmp_path)
        assert wrapped.iteration == 0
        wrapped.close()


def test_a_store_that_cannot_be_marked_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REL-1: with read access only, every load goes back by itself."""
    save_steps(tmp_path, 1, 2)
    HARMS["a bit of a weight"](tmp_path / "varuna_ckpt_2")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr("varuna.checkpoint.store.local.LocalStore.replace", refuse)
            wrapped = wrap()
            assert wrapped.load_checkpoint(tmp_path) == 1
            wrapped.close()


def test_a_checkpoint_that_was_saved_again_or_removed_meanwhile_is_not_set_aside(tmp_path: Path) -> None:
    """REL-1: a job may load while another removes and saves."""
    save_steps(tmp_path, 1)
    store = open_store(str(tmp_path))
    old = open_checkpoint(store, 1).manifest
    save_steps(tmp_path, 1)
    assert not set_aside(store, 1, "gone", old)
    assert not status_of(store, 1).problem
    store.remove("varuna_ckpt_1")
    assert not set_aside(store, 1, "gone", old)
    assert newest_whole(store) == (None, [])


def load_on_ranks(store: str, environment: dict[str, str] | None = None, **shape: int) -> tuple[int, float]:
    os.environ.update(environment or {})
    wrapped = wrap(timeout_seconds=30, **shape)
    resumed = wrapped.resume(store)
    loss = train(wrapped) if shape["width"] == 1 else 0.0
    wrapped.close()
    return resumed, loss


def save_on_ranks(
    store: str, steps: tuple[int, ...], environment: dict[str, str] | None = None, **shape: int
) -> None:
    os.environ.update(environment or {})
    wrapped = wrap(timeout_seconds=30, **shape)
    for step in steps:
        train(wrapped, step - wrapped.iteration)
        wrapped.checkpoint(store, shard=shape["width"] > 1)
    wrapped.close()


@pytest.mark.parametrize("victim", ["stage-0-replica-0", "stage-1-replica-0"])
def test_all_ranks_go_back_though_only_one_reads_the_damage(victim: str, pool: Pool, tmp_path: Path) -> None:
    """REL-1: no rank changes its state before all have verified theirs."""
    pool.run(save_on_ranks, 2, str(tmp_path), (1, 3), depth=2, width=1)
    (file,) = (tmp_path / "varuna_ckpt_3").glob(f"{victim}-*.safetensors")
    flip(file, -1)
    found = pool.run(load_on_ranks, 2, str(tmp_path), depth=2, width=1)
    assert [resumed for resumed, _ in found] == [1, 1]
    (reason,) = (path.read_text() for path in (tmp_path / "varuna_ckpt_3").glob("broken-*.txt"))
    assert f"rank {victim[6]} (stage {victim[6]}, replica 0): " in reason and "is damaged" in reason


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with closing(S3Server()) as server:
        yield server


def harm_object(store: Store, harm: str) -> None:
    folder = "varuna_ckpt_3"
    (file,) = (e.name for e in store.list(folder) if e.name.endswith(".safetensors") and "stage-1" in e.name)
    name = "manifest.json" if "manifest" in harm else file
    data = bytearray(store.read(f"{folder}/{name}"))
    data[-1 if name == file else 300] ^= 1
    if harm == "missing":
        store.remove(f"{folder}/{name}")
    else:
        store.replace(f"{folder}/{name}", bytes(data) if "flip" in harm else b"")


@pytest.mark.parametrize("harm", ["flip", "flip of the manifest", "empty", "missing"])
def test_an_object_store_goes_back_as_a_folder_does(
    harm: str, pool: Pool, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REL-1: on S3, the mark is an object."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{harm.replace(' ', '-')}"
    pool.run(save_on_ranks, 2, url, (1, 3), environment=server.environment, depth=2, width=1)
    store = open_store(url)
    harm_object(store, harm)
    found = pool.run(load_on_ranks, 2, url, environment=server.environment, depth=2, width=1)
    assert [resumed for resumed, _ in found] == [1, 1]
    assert [e.name for e in store.list("varuna_ckpt_3") if e.name.startswith("broken-")]
    assert newest_complete(store) == 1
