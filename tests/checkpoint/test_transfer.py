"""A checkpoint goes out to files that others read, and their files come in, bit for bit and whole or not."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from varuna.checkpoint.format.manifest import MANIFEST, Facts, Json, Manifest, folder_of
from varuna.checkpoint.format.part import lay_out
from varuna.checkpoint.format.tensors import as_plain, memory_of, spec_of
from varuna.checkpoint.format.tree import pack
from varuna.checkpoint.load import all_checkpoints, newest_complete, open_checkpoint, verify
from varuna.checkpoint.save import commit, write_part
from varuna.checkpoint.store.store import Owner, Store, open_store
from varuna.checkpoint.transfer import INDEX, WHOLE, export, import_state, read_source, split, ties_among
from varuna.errors import CheckpointError, StoreTaken

ME = Owner("import-test", "token", "here", 1)
STRANGE = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "every.second": torch.arange(10)[::2],
    "half": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "mask": torch.tensor([True, False]),
    "name with / and ü": torch.ones(2, dtype=torch.float16),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def facts_of(step: int, ties: tuple[tuple[str, ...], ...] = ()) -> Facts:
    return Facts(step, 0, f"a{step}", "job", ties=ties)


def save(
    store: Store,
    model: Mapping[str, Tensor],
    *,
    step: int = 3,
    parts: int = 1,
    other: Mapping[str, Tensor] | None = None,
    trees: Mapping[str, Json] | None = None,
) -> Manifest:
    """A checkpoint as a job would write it: shared tensors once, spread over several parts."""
    groups = ties_among(model)
    facts = facts_of(step, tuple(group for group in groups if len(group) > 1))
    tensors = {f"model/{group[0]}": model[group[0]] for group in groups} | dict(other or {})
    plain = {key: as_plain(key, tensor) for key, tensor in tensors.items()}
    written = []
    for part in range(parts):
        specs = [spec_of(key, plain[key]) for key in list(plain)[part::parts]]
        layout = lay_out(specs, metadata={})
        written.append(
            write_part(
                store, facts, f"w{part}", specs, layout, lambda key: memory_of(plain[key]), trees or {}
            )
        )
    return commit(store, written)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare bit by bit, also NaNs."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bytes(memory_of(as_plain("", found[name]))) == bytes(memory_of(as_plain("", tensor))), name


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 7, bias=False))
    model[3].weight = model[0].weight
    return model


# ---------------------------------------------------------------- out


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_state_dict_loads_strictly_with_every_name_of_a_shared_tensor(
    store: Store, tmp_path: Path, suffix: str
) -> None:
    """V38: a checkpoint becomes a plain state_dict."""
    model = tied_model()
    save(store, model.state_dict(), parts=2)
    export(open_checkpoint(store, None), tmp_path / f"x{suffix}")
    state = torch.load(tmp_path / f"x{suffix}", weights_only=True)
    assert_equal(state, model.state_dict())
    assert state["0.weight"].untyped_storage().data_ptr() == state["3.weight"].untyped_storage().data_ptr()
    assert state["1.weight"].untyped_storage().nbytes() == 4 * 4 * 4
    tied_model().load_state_dict(state, strict=True)


@pytest.mark.parametrize("out", ["x.pt", "x.safetensors", "folder"])
def test_strange_tensors_go_out_and_come_back_bit_for_bit(store: Store, tmp_path: Path, out: str) -> None:
    save(store, STRANGE, parts=3)
    export(open_checkpoint(store, 3), tmp_path / out, max_shard_bytes=40)
    state = read_source(tmp_path / out)
    assert_equal(state, STRANGE)
    import_state(store, state, facts_of(9), ME)
    again = open_checkpoint(store, 9)
    assert verify(again) == []
    export(again, tmp_path / "again.safetensors")
    assert_equal(safetensors.torch.load_file(tmp_path / "again.safetensors"), STRANGE)


def test_only_the_model_goes_out(store: Store, tmp_path: Path) -> None:
    save(store, STRANGE, other={"transient/mask": torch.ones(2), "optimizer/weight/step": torch.ones(())})
    export(open_checkpoint(store, 3), tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert set(file.keys()) == STRANGE.keys()
        assert file.metadata() == {"format": "pt"}


def test_a_checkpoint_without_a_model_is_refused(store: Store, tmp_path: Path) -> None:
    save(store, {}, other={"registered/x/y": torch.ones(1)})
    with pytest.raises(CheckpointError, match="has no model"):
        export(open_checkpoint(store, 3), tmp_path / "x.pt")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("out", ["x.pt", "folder"])
def test_floating_tensors_are_converted_on_request_and_others_stay(
    store: Store, tmp_path: Path, out: str, dtype: str
) -> None:
    save(store, STRANGE | {"eight": torch.arange(4.0).to(torch.float8_e4m3fn)})
    export(open_checkpoint(store, 3), tmp_path / out, dtype=dtype)
    kind = getattr(torch, dtype)
    expected = {name: t.to(kind) if t.is_floating_point() else t for name, t in STRANGE.items()}
    assert_equal(read_source(tmp_path / out), expected | {"eight": torch.arange(4.0).to(kind)})


def test_no_number_becomes_infinite_by_conversion(store: Store, tmp_path: Path) -> None:
    save(
        store, {"a": torch.tensor([1.0, float("inf"), float("nan")]), "b": torch.tensor([1e5, float("nan")])}
    )
    with pytest.raises(CheckpointError, match=r"^b holds 100000, too large for float16"):
        export(open_checkpoint(store, 3), tmp_path / "x.pt", dtype="float16")
    export(open_checkpoint(store, 3), tmp_path / "x.pt", dtype="bfloat16")


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_every_tensor_lies_in_one_shard_and_none_is_too_large_unless_one_tensor_is(
    sizes: list[int], limit: int
) -> None:
    shards = split(list(enumerate(sizes)), limit, size=lambda item: item[1])
    assert [item for shard in shards for item in shard] == list(enumerate(sizes))
    assert all(shards)
    for shard in shards:
        assert sum(size for _, size in shard) <= limit or sum(size > 0 for _, size in shard) == 1


def hugging_face_models() -> dict[str, Callable[[], PreTrainedModel]]:
    gpt2 = GPT2Config(vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    llama = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    bert = BertConfig(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
    )
    return {
        "gpt2": lambda: GPT2LMHeadModel(gpt2),
        "gpt2 untied": lambda: GPT2LMHeadModel(
            GPT2Config(**{**gpt2.to_dict(), "tie_word_embeddings": False})
        ),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**llama, **heads)),
        "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**llama, **heads, tie_word_embeddings=True)),
        "bert": lambda: BertForMaskedLM(bert),
    }


def make(kind: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    return hugging_face_models()[kind]().eval()


@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000])
@pytest.mark.parametrize("kind", hugging_face_models())
def test_hugging_face_loads_what_is_exported(
    store: Store, tmp_path: Path, kind: str, max_shard_bytes: int
) -> None:
    """V38: safetensors that Hugging Face loads, offline, without the job."""
    model = make(kind, 1)
    save(store, model.state_dict(), parts=2)
    config = tmp_path / "some.json"
    config.write_text(model.config.to_json_string())
    out = tmp_path / "out"
    files = export(open_checkpoint(store, None), out, max_shard_bytes=max_shard_bytes, config=config)
    assert sorted(os.listdir(out)) == sorted(file.name for file in files)
    assert (WHOLE in os.listdir(out)) == (max_shard_bytes == 10**9)
    loaded, info = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert_equal(loaded.state_dict(), model.state_dict())
    tokens = torch.arange(8).reshape(1, 8)
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("max_shard_size", ["1GB", "3KB"])
@pytest.mark.parametrize("kind", hugging_face_models())
def test_what_hugging_face_wrote_comes_in_bit_for_bit(
    store: Store, tmp_path: Path, kind: str, max_shard_size: str
) -> None:
    """V38: and such a file starts a job."""
    model = make(kind, 2)
    model.save_pretrained(tmp_path / "hf", max_shard_size=max_shard_size)
    import_state(store, read_source(tmp_path / "hf"), facts_of(0), ME)
    export(open_checkpoint(store, 0), tmp_path / "x.safetensors")
    state = safetensors.torch.load_file(tmp_path / "x.safetensors")
    ties = {name: group[0] for group in ties_among(model.state_dict()) for name in group}
    assert {ties[name] for name in state} == set(ties.values())
    assert_equal(state, {name: model.state_dict()[name] for name in state})


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("wrap", [dict, lambda s: {"state_dict": s}, lambda s: {"model": s, "epoch": 3}])
def test_what_torch_saved_comes_in_and_goes_out_as_it_was(
    store: Store, tmp_path: Path, wrap: Callable[[Any], Any], legacy: bool
) -> None:
    """V38: also with tensors that are shared, whatever the file holds beside the model."""
    model = tied_model()
    torch.save(wrap(model.state_dict()), tmp_path / "x.pt", _use_new_zipfile_serialization=not legacy)
    manifest = import_state(store, read_source(tmp_path / "x.pt"), facts_of(0), ME)
    assert manifest.facts.ties == (("0.weight", "3.weight"),)
    assert "model/3.weight" not in manifest.tensors and not manifest.trees
    export(open_checkpoint(store, 0), tmp_path / "y.pt")
    assert_equal(torch.load(tmp_path / "y.pt"), model.state_dict())


def test_views_of_one_storage_that_differ_are_not_one_tensor() -> None:
    whole = torch.arange(4.0)
    state = {
        "first": whole[:2],
        "last": whole[2:],
        "all": whole,
        "again": whole,
        "e": whole[:0],
        "f": whole[:0],
    }
    assert ties_among(state) == [("first",), ("last",), ("all", "again"), ("e",), ("f",)]


def test_the_optimizer_goes_out_as_torch_takes_it_by_name(store: Store, tmp_path: Path) -> None:
    model = tied_model()
    trained = torch.optim.AdamW(
        [
            {"params": [model[0].weight], "lr": 0.5},
            {"params": [*model[1].parameters(), *model[2].parameters()]},
        ]
    )
    model(torch.arange(6)).square().mean().backward()
    trained.step()
    tensors: dict[str, Tensor] = {}
    options = [{key: group[key] for key in group if key != "params"} for group in trained.param_groups]
    trees: dict[str, Json] = {"groups": [pack(group, "", {}) for group in options]}
    for name, parameter in model.named_parameters():
        state = pack(dict(trained.state[parameter]), f"optimizer/{name}", tensors)
        trees[f"optimizer/{name}"] = {"group": int(name != "0.weight"), "state": state}
    save(store, model.state_dict(), other=tensors, trees=trees)
    export(open_checkpoint(store, 3), tmp_path / "x.pt", with_optimizer=True, dtype="bfloat16")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["iteration"] == 0 and found["model"]["1.weight"].dtype == torch.bfloat16
    fresh = torch.optim.AdamW(
        [{"params": [model[0].weight]}, {"params": [*model[1].parameters(), *model[2].parameters()]}], lr=9
    )
    set_optimizer_state_dict(model, fresh, found["optimizer"])
    assert [group["lr"] for group in fresh.param_groups] == [0.5, 0.001]
    for parameter in model.parameters():
        assert_equal(fresh.state[parameter], trained.state[parameter])


def test_with_optimizer_needs_an_optimizer_state_and_a_pt_file(store: Store, tmp_path: Path) -> None:
    save(store, STRANGE)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        export(open_checkpoint(store, 3), tmp_path / "x.pt", with_optimizer=True)
    with pytest.raises(ValueError, match=r"only a \.pt file can hold"):
        export(open_checkpoint(store, 3), tmp_path / "folder", with_optimizer=True)
    with pytest.raises(ValueError, match="a config needs a folder"):
        export(open_checkpoint(store, 3), tmp_path / "x.pt", config=tmp_path / "config.json")
    assert os.listdir(tmp_path) == ["store"]


# ---------------------------------------------------------------- what is there already


@pytest.mark.parametrize("out", ["x.pt", "x.safetensors", "folder"])
def test_nothing_is_overwritten_without_overwrite(store: Store, tmp_path: Path, out: str) -> None:
    save(store, {"a": torch.zeros(3)}, step=1)
    save(store, {"a": torch.ones(3)}, step=2)
    export(open_checkpoint(store, 1), tmp_path / out)
    with pytest.raises(FileExistsError, match="already exists"):
        export(open_checkpoint(store, 2), tmp_path / out)
    assert_equal(read_source(tmp_path / out), {"a": torch.zeros(3)})
    export(open_checkpoint(store, 2), tmp_path / out, overwrite=True)
    assert_equal(read_source(tmp_path / out), {"a": torch.ones(3)})


@pytest.mark.parametrize(("before", "after"), [(1, 99), (99, 1), (1, 20)])
def test_a_folder_keeps_what_is_not_the_models_and_no_shard_of_an_old_one(
    store: Store, tmp_path: Path, before: int, after: int
) -> None:
    save(store, {str(i): torch.full((3,), float(i)) for i in range(4)})
    out = tmp_path / "folder"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")
    export(open_checkpoint(store, 3), out, max_shard_bytes=before)
    files = export(open_checkpoint(store, 3), out, max_shard_bytes=after, overwrite=True)
    assert sorted(os.listdir(out)) == sorted([file.name for file in files] + ["tokenizer.json"])
    assert (out / "tokenizer.json").read_text() == "mine"


def test_a_folder_is_not_replaced_by_a_file_nor_a_file_by_a_folder(store: Store, tmp_path: Path) -> None:
    save(store, STRANGE)
    (tmp_path / "x.pt").mkdir()
    (tmp_path / "folder").touch()
    with pytest.raises(IsADirectoryError, match="selects a file"):
        export(open_checkpoint(store, 3), tmp_path / "x.pt", overwrite=True)
    with pytest.raises(NotADirectoryError, match="needs a folder"):
        export(open_checkpoint(store, 3), tmp_path / "folder", overwrite=True)


def test_an_import_replaces_a_step_only_with_overwrite_but_an_interrupted_one_always(
    store: Store,
) -> None:
    state = {"a": torch.ones(3)}
    save(store, {"a": torch.zeros(3)}, step=0)
    with pytest.raises(CheckpointError, match=r"already has a checkpoint of step 0 \(complete"):
        import_state(store, state, facts_of(0), ME)
    file = next(iter(open_checkpoint(store, 0).manifest.files))
    store.remove(f"{folder_of(0)}/{file}")
    with pytest.raises(CheckpointError, match=f"incomplete: {file} is missing"):
        import_state(store, state, facts_of(0), ME)
    import_state(store, state, Facts(0, 0, "b", "job"), ME, overwrite=True)
    assert verify(open_checkpoint(store, 0)) == []
    store.remove(f"{folder_of(0)}/{MANIFEST}")
    import_state(store, state, Facts(0, 0, "c", "job"), ME)
    assert verify(open_checkpoint(store, 0)) == []


def test_an_import_does_not_disturb_a_running_job_and_frees_the_store_at_its_end(store: Store) -> None:
    claim = store.claim(Owner("running", "t", "there", 2))
    with pytest.raises(StoreTaken, match="job running"):
        import_state(store, {"a": torch.ones(3)}, facts_of(0), ME)
    assert all_checkpoints(store) == []
    claim.release()
    import_state(store, {"a": torch.ones(3)}, facts_of(0), ME)
    store.claim(Owner("running", "t", "there", 2)).release()


# ---------------------------------------------------------------- damage


def flip_a_bit(store: Store) -> str:
    entry = open_checkpoint(store, 3).manifest.tensors["model/weight"]
    path = Path(store.url) / folder_of(3) / entry.file
    data = bytearray(path.read_bytes())
    data[entry.first + 5] ^= 4
    path.write_bytes(data)
    return "'model/weight' in .* is damaged"


def lose_a_part(store: Store) -> str:
    file = open_checkpoint(store, 3).manifest.tensors["model/weight"].file
    store.remove(f"{folder_of(3)}/{file}")
    return f"{file} is missing"


def come_from_the_future(store: Store) -> str:
    path = Path(store.url) / folder_of(3) / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 99}))
    return "has version 99"


@pytest.mark.parametrize("out", ["x.pt", "x.safetensors", "folder"])
@pytest.mark.parametrize("damage", [flip_a_bit, lose_a_part, come_from_the_future])
def test_a_broken_checkpoint_is_not_exported(
    store: Store, tmp_path: Path, out: str, damage: Callable[[Store], str]
) -> None:
    """V37: what is broken is named, with the newest complete one; nothing is written."""
    save(store, STRANGE, step=2)
    save(store, STRANGE, parts=2)
    expected_text = damage(store)
    with pytest.raises(CheckpointError, match=f"{expected_text}.*newest complete step is 2"):
        export(open_checkpoint(store, 3), tmp_path / out, max_shard_bytes=1)
    assert os.listdir(tmp_path) == ["store"]


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_a_pickle_with_code_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Bomb()}, "x.pt")
    Path("plain.bin").write_bytes(pickle.dumps({"a": Bomb()}, protocol=2))
    for name in ("x.pt", "plain.bin"):
        with pytest.raises(CheckpointError, match=r"refused: it is a pickle that calls (posix|os)\.mkdir"):
            read_source(Path(name))
    assert sorted(os.listdir()) == ["plain.bin", "x.pt"]


def index_to(place: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {"a": place}}).encode()


@pytest.mark.parametrize(
    ("files", "expected_text"),
    [
        ({}, "contains no model"),
        ({"x.pt": b"nonsense"}, "x.pt is not a file of torch.save"),
        ({"x.pt": b""}, "x.pt is not a file of torch.save"),
        ({"x.safetensors": b"short"}, "is not a safetensors file: it has 5 bytes"),
        ({"x.safetensors": b"\xff" * 100}, "is not a safetensors file"),
        ({"x.safetensors": b"\x02\0\0\0\0\0\0\0{}"}, "contains no tensors"),
        ({"x.safetensors": b"\x02\0\0\0\0\0\0\0[]"}, "is not a safetensors file"),
        ({"a.safetensors": b"", "b.safetensors": b""}, "a.safetensors, b.safetensors and no index"),
        ({"model-00001-of-00002.safetensors": b""}, "model-00001-of-00002.safetensors and no index"),
        ({"a.pt": b"", "b.bin": b""}, "a.pt, b.bin and no index"),
        ({INDEX: b"{}"}, "index.json is not a valid ShardIndex"),
        ({INDEX: index_to("../x.safetensors")}, "not a plain file name: refused"),
        ({INDEX: index_to("x.safetensors")}, "No such file"),
        ({INDEX: index_to("x.safetensors"), "x.safetensors": None}, "does not contain 'a'"),
    ],
)
def test_files_that_cannot_be_imported_are_refused(
    tmp_path: Path, files: dict[str, bytes | None], expected_text: str
) -> None:
    for name, content in files.items():
        if content is None:
            safetensors.torch.save_file({"b": torch.ones(1)}, tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content)
    with pytest.raises((CheckpointError, ValueError, OSError), match=expected_text):
        read_source(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected_text"),
    [
        ([torch.ones(1)], "contains a list, not a state_dict"),
        ({}, "contains no tensors"),
        ({"a": torch.ones(1), "epoch": 3}, "contains a int under 'epoch'"),
        ({3: torch.ones(1)}, "contains a Tensor under 3"),
        ({"a": torch.ones(2, 2).to_sparse()}, "'a' in .* is a torch.sparse_coo tensor"),
        ({"a": torch.ones(2, device="meta")}, "import needs dense tensors"),
        (
            {"a": torch.ones(1, dtype=torch.complex128)},
            "a has dtype complex128, which safetensors does not support",
        ),
    ],
)
def test_a_torch_file_without_a_state_dict_is_refused(
    store: Store, tmp_path: Path, content: Any, expected_text: str
) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=expected_text):
        import_state(store, read_source(tmp_path / "x.pt"), facts_of(0), ME)
    assert all_checkpoints(store) == []


@pytest.mark.parametrize("missing", [1, 100])
def test_a_truncated_file_is_not_imported(tmp_path: Path, missing: int) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    safetensors.torch.save_file({"a": torch.ones(100)}, tmp_path / "x.safetensors")
    for path in (tmp_path / "x.pt", tmp_path / "x.safetensors"):
        path.write_bytes(path.read_bytes()[:-missing])
        with pytest.raises(CheckpointError, match=r"x\.(pt is not a file of torch|safetensors is truncated)"):
            read_source(path)


# ---------------------------------------------------------------- kills


def killed_before_operation(number: int, act: Callable[[], object]) -> bool:
    """Runs it in a process that is killed before its nth operation on files; False where it had fewer."""
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, arguments: object) -> None:
            nonlocal left
            if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            act()
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize(
    ("out", "max_shard_bytes"), [("x.pt", 1), ("x.safetensors", 1), ("f", 99), ("f", 20)]
)
def test_whatever_an_export_that_is_killed_leaves_is_whole_or_does_not_look_so(
    store: Store, tmp_path: Path, out: str, max_shard_bytes: int, existing: bool
) -> None:
    old, new = ({str(i): torch.full((3,), value) for i in range(3)} for value in (0.0, 1.0))
    save(store, old, step=1)
    save(store, new, step=2)
    path = tmp_path / out
    if existing:
        export(open_checkpoint(store, 1), path, max_shard_bytes=max_shard_bytes)
    checkpoint = open_checkpoint(store, 2)
    seen = set()
    number = 0
    while killed_before_operation(
        number, lambda: export(checkpoint, path, max_shard_bytes=max_shard_bytes, overwrite=True)
    ):
        number += 1
        if not path.is_dir() and not path.exists():
            continue
        if path.is_dir() and WHOLE not in os.listdir(path) and INDEX not in os.listdir(path):
            with pytest.raises(CheckpointError, match=r"no model|no index"):
                read_source(path)
            continue
        found = read_source(path)
        value = found["0"][0].item()
        assert_equal(found, new if value else old)
        seen.add(value)
    assert number > 3
    assert seen <= ({0.0, 1.0} if existing else {1.0})
    assert_equal(read_source(path), new)


def test_an_import_that_is_killed_leaves_no_checkpoint_or_a_whole_one(store: Store) -> None:
    number = 0
    while killed_before_operation(number, lambda: import_state(store, STRANGE, Facts(0, 0, "a", ""), ME)):
        number += 1
        if newest_complete(store) is not None:
            assert verify(open_checkpoint(store, 0)) == []
            store.remove(folder_of(0))
    assert number > 3
    assert verify(open_checkpoint(store, 0)) == []


# ---------------------------------------------------------------- size

WITH_LITTLE_MEMORY = """
import re, resource, sys, torch
from pathlib import Path
from varuna.checkpoint.load import open_checkpoint
from varuna.checkpoint.format.manifest import Facts
from varuna.checkpoint.store.store import Owner, open_store
from varuna.checkpoint.transfer import export, import_state, read_source

folder, megabytes = Path(sys.argv[1]), 1 << 20
remote = open_store("memory://store")
state = {str(i): torch.full((megabytes,), float(i)) for i in range(32)}  # 128 MiB
me = Owner("job", "token", "here", 1)
import_state(remote, state, Facts(0, 0, "a", "job"), me)
del state
used = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + 64 * megabytes, used + 64 * megabytes))
try:
    too_much = [torch.ones(megabytes) for _ in range(32)]
    sys.exit("this limit limits nothing")
except RuntimeError:
    too_much = None
for name in ("x.pt", "half.pt", "x.safetensors", "folder"):
    dtype = "float16" if name == "half.pt" else None
    export(open_checkpoint(remote, 0), folder / name, max_shard_bytes=50 * megabytes, dtype=dtype)
import_state(open_store(str(folder / "store")), read_source(folder / "folder"), Facts(1, 0, "a", "job"), me)
"""


def test_a_model_larger_than_memory_is_exported_and_imported(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITH_LITTLE_MEMORY, str(tmp_path)], capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    for name in ("x.pt", "x.safetensors", "folder"):
        assert_equal(read_source(tmp_path / name), read_source(tmp_path / "x.pt"))
    assert torch.equal(
        torch.load(tmp_path / "half.pt")["31"], torch.full((1 << 20,), 31, dtype=torch.float16)
    )
    assert verify(open_checkpoint(open_store(str(tmp_path / "store")), 1)) == []
