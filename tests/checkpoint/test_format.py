"""The files on disk: readable by other programs, without pickle, with every damage detected."""

import collections
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from varuna.checkpoint.format.manifest import (
    MANIFEST,
    Facts,
    FileEntry,
    Json,
    Manifest,
    TensorEntry,
    check_places,
    folder_of,
    seal,
)
from varuna.checkpoint.format.part import DTYPES, lay_out, read_header
from varuna.checkpoint.format.tensors import as_plain, memory_of, spec_of, tensor_from
from varuna.checkpoint.format.tree import pack, tensors_in, unpack
from varuna.checkpoint.load import (
    Checkpoint,
    all_checkpoints,
    newest_complete,
    open_checkpoint,
    status_of,
    verify,
)
from varuna.checkpoint.save import commit, remove_old, remove_part, write_part
from varuna.checkpoint.store.store import Store, open_store
from varuna.errors import CheckpointError

TENSORS = {
    "model/a.weight": torch.arange(12.0).reshape(3, 4),
    "model/a.bias": torch.tensor([1, 2, 3], dtype=torch.int8),
    "model/half": torch.arange(5, dtype=torch.bfloat16),
    "model/empty": torch.empty(0, 3),
    "optimizer/a.weight/step": torch.tensor(7.0),
}


def write(
    store: Store,
    step: int,
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    writer: str = "w0",
    attempt: str = "a",
    trees: dict[str, Json] | None = None,
    by_itself: bool = False,
) -> Any:
    plain = {key: as_plain(key, tensor) for key, tensor in (TENSORS if tensors is None else tensors).items()}
    specs = [spec_of(key, tensor) for key, tensor in plain.items()]
    facts = Facts(step, step, attempt, "job", by_itself=by_itself)
    layout = lay_out(specs, metadata={"format": "pt"})
    return write_part(store, facts, writer, specs, layout, lambda key: memory_of(plain[key]), trees or {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def test_a_part_is_a_safetensors_file_as_others_read_it(store: Store) -> None:
    (file,) = write(store, 1).files
    path = Path(store.url) / folder_of(1) / file
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    places = read_header(path.read_bytes(), "it")
    assert {key: spec.shape for key, (spec, _, _) in places.items()} == {
        key: tuple(tensor.shape) for key, tensor in TENSORS.items()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(dtype: str, store: Store) -> None:
    kind = getattr(torch, dtype)
    raw = torch.arange(64, dtype=torch.uint8)
    tensor = (raw % 2 == 0) if dtype == "bool" else raw.view(kind)
    commit(store, [write(store, 1, {"model/x": tensor})])
    opened = open_checkpoint(store, 1)
    back = tensor_from(opened.read(["model/x"])["model/x"], opened.manifest.tensors["model/x"])
    assert back.dtype == kind and bytes(memory_of(back)) == bytes(memory_of(tensor))


def test_a_dtype_that_the_form_does_not_know_is_refused_by_name(store: Store) -> None:
    with pytest.raises(CheckpointError, match="model/z has dtype complex128"):
        write(store, 1, {"model/z": torch.zeros(2, dtype=torch.complex128)})


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=4).map(collections.Counter)
        | st.lists(inner, max_size=4).map(lambda items: collections.deque(items, 4))
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=12,
)


@given(TREES)
def test_any_state_comes_back_from_json_as_it_was(value: Any) -> None:
    """V36: states of schedulers and loaders, with their tuples, counters and infinities."""
    packed = json.loads(json.dumps(pack(value, "it", {})))
    back = unpack(packed, lambda key: torch.empty(0))
    assert back == value and type(back) is type(value)


def test_tensors_in_a_state_are_kept_by_name() -> None:
    state = {"step": 3, "parts": [torch.ones(2), (torch.zeros(1), math.inf)], 5: torch.tensor(2)}
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(state, "registered/x", tensors)))
    assert (
        sorted(tensors)
        == sorted(tensors_in(packed))
        == [
            "registered/x/5",
            "registered/x/parts/0",
            "registered/x/parts/1/0",
        ]
    )
    back = unpack(packed, tensors.__getitem__)
    assert back["parts"][1][1] == math.inf and torch.equal(back["parts"][0], torch.ones(2))


def test_what_cannot_be_held_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"registered/x/fn is a builtins\.function"):
        pack({"fn": lambda: 0}, "registered/x", {})


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_goes_unseen(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """V37: in the manifest or in any byte of a tensor."""
    store = open_store(str(tmp_path_factory.mktemp("store")))
    manifest = commit(store, [write(store, 1, trees={"groups": [{"dict": [["lr", 0.1]]}]})])
    name = data.draw(st.sampled_from([MANIFEST, *manifest.files]))
    path = Path(store.url) / folder_of(1) / name
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    assert status_of(store, 1).problem if name == MANIFEST else verify(Checkpoint(store, manifest))


def test_reading_names_what_is_damaged_and_the_newest_sound_one(store: Store) -> None:
    """V37"""
    for step in (1, 2, 3):
        manifest = commit(store, [write(store, step)])
    entry = manifest.tensors["model/a.weight"]
    path = Path(store.url) / folder_of(3) / entry.file
    content = bytearray(path.read_bytes())
    content[entry.first + 5] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"'model/a.weight' in w0-a.safetensors is damaged"):
        open_checkpoint(store, 3).read(["model/a.weight"])
    assert bytes(open_checkpoint(store, 3).read(["model/a.bias"])["model/a.bias"]) == b"\x01\x02\x03"
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"bytes instead of .*the newest complete step is 2"):
        open_checkpoint(store, 3)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"w0-a.safetensors is missing"):
        open_checkpoint(store, 3)
    assert newest_complete(store) == 2


def test_an_interrupted_save_is_loaded_only_without_check_complete(store: Store) -> None:
    """V37: without a manifest it is not there; its parts can be had by name."""
    commit(store, [write(store, 1)])
    write(store, 2, {"model/a": torch.ones(3)}, writer="w0", attempt="b")
    assert newest_complete(store) == 1
    assert [one.step for one in all_checkpoints(store) if one.problem] == [2]
    with pytest.raises(CheckpointError, match="interrupted"):
        open_checkpoint(store, 2)
    salvaged = open_checkpoint(store, 2, check_complete=False)
    assert list(salvaged.manifest.tensors) == ["model/a"]
    with pytest.raises(CheckpointError, match="it does not exist"):
        open_checkpoint(store, 9)
    with pytest.raises(CheckpointError, match="it has no complete part"):
        open_checkpoint(store, 9, check_complete=False)


def test_a_checkpoint_is_replaced_without_a_moment_in_which_there_is_none(store: Store) -> None:
    first = commit(store, [write(store, 1, attempt="a")])
    write(store, 1, {"model/new": torch.ones(1)}, attempt="b")
    assert status_of(store, 1).manifest == first  # until the second is committed
    second = commit(store, [write(store, 1, {"model/new": torch.ones(1)}, attempt="b")])
    assert status_of(store, 1).manifest == second
    remove_old(store, second, keep_last=None)
    names = [entry.name for entry in store.list(folder_of(1))]
    assert names == ["manifest.json", "w0-b.json", "w0-b.safetensors"]


def test_only_the_newest_are_kept_and_interrupted_ones_go(store: Store) -> None:
    for step in (1, 2, 3, 4):
        commit(store, [write(store, step)])
    write(store, 5)
    manifest = commit(store, [write(store, 6)])
    assert remove_old(store, manifest, keep_last=2) == [1, 2, 3, 5]
    assert [one.step for one in all_checkpoints(store)] == [4, 6]
    assert remove_old(store, manifest, keep_last=None) == []


def test_what_a_job_saved_by_itself_goes_for_newer_ones_and_never_for_the_scripts_own(store: Store) -> None:
    for step in (1, 2, 3, 4):
        commit(store, [write(store, step, by_itself=step != 2)])
    manifest = commit(store, [write(store, 5, by_itself=True)])
    assert remove_old(store, manifest, keep_last=None) == [1, 3]
    manifest = commit(store, [write(store, 6)])
    assert remove_old(store, manifest, keep_last=2) == [], "4 and 5 do not count"
    manifest = commit(store, [write(store, 7)])
    assert remove_old(store, manifest, keep_last=1) == [2, 4, 5, 6], "there is a newer one of the script"
    assert [one.step for one in all_checkpoints(store)] == [7]


def test_an_abandoned_part_leaves_nothing(store: Store) -> None:
    part = write(store, 3)
    remove_part(store, part.facts, "w0")
    assert store.list() == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b", "..", ""])
def test_a_manifest_that_points_out_of_its_folder_is_refused(name: str, store: Store) -> None:
    """V37: before anything there is looked at."""
    manifest = commit(store, [write(store, 1)])
    (file,) = manifest.files
    text = msgspec.json.encode(manifest).decode().replace(f'"{file}"', json.dumps(name))
    forged = msgspec.json.encode(seal(msgspec.json.decode(text, type=Manifest)))
    (Path(store.url) / folder_of(1) / MANIFEST).write_bytes(forged)
    assert "not a plain file name: refused" in status_of(store, 1).problem


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (2**40,)), ("load", (4,)), ("float32", (-1, -1))])
def test_a_manifest_with_a_tensor_of_another_size_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    """A hostile manifest must not make a loader allocate all memory."""
    files = {"w0.safetensors": FileEntry(100, "")}
    entry = TensorEntry("w0.safetensors", dtype, shape, 50, 54, "")
    with pytest.raises(CheckpointError, match="which is not the size of"):
        check_places(files, {"model/a": entry}, "m")


def test_a_newer_version_and_a_foreign_document_are_refused_by_name(store: Store) -> None:
    """V37"""
    commit(store, [write(store, 1)])
    path = Path(store.url) / folder_of(1) / MANIFEST
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "version": 99}))
    with pytest.raises(CheckpointError, match="has version 99, this varuna reads up to 1"):
        open_checkpoint(store, 1)
    path.write_text(json.dumps({**fields, "format": "something"}))
    with pytest.raises(CheckpointError, match="its format is 'something'"):
        open_checkpoint(store, 1)
    path.write_text("no JSON")
    with pytest.raises(CheckpointError, match="is damaged"):
        open_checkpoint(store, 1, check_complete=False)  # never integrity


def test_one_stage_reads_its_own_bytes_alone(store: Store) -> None:
    """V36: only the spans of the requested tensors."""
    commit(store, [write(store, 1)])
    opened = open_checkpoint(store, 1)
    asked: list[tuple[int, int]] = []

    class Watched:
        def read_spans(self, path: str, spans: Any) -> Any:
            asked.extend(spans)
            return store.read_spans(path, spans)

    Checkpoint(Watched(), opened.manifest).read(["model/half"])  # type: ignore[arg-type]
    entry = opened.manifest.tensors["model/half"]
    assert asked == [(entry.first, entry.stop)] and entry.stop - entry.first == 10
