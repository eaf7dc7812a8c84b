"""`varuna checkpoint`: ls, verify, export and import."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.cli.commands import Cli, on_a_terminal
from tests.without_torch import run_without_torch
from varuna.checkpoint.format.manifest import MANIFEST, Facts, folder_of
from varuna.checkpoint.format.part import lay_out
from varuna.checkpoint.format.tensors import memory_of, spec_of
from varuna.checkpoint.load import open_checkpoint
from varuna.checkpoint.save import commit, write_part
from varuna.checkpoint.store.store import Owner, Store, open_store
from varuna.types import Plan, StagePlan
from varuna.units import format_bytes

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.arange(3.0)}
PLAN = Plan((StagePlan(0, 1, (0, 1)), StagePlan(1, 2, (2, 3))), batch_size=64, microbatch_size=4)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def save(store: Store, step: int, state: dict[str, Tensor] = STATE, *, finish: bool = True) -> None:
    tensors = {f"model/{name}": tensor for name, tensor in state.items()}
    facts = Facts(step, step, f"a{step}", "job-7", plan=PLAN, created="2031-01-01T00:00:00Z")
    specs = [spec_of(key, tensor) for key, tensor in tensors.items()]
    layout = lay_out(specs, metadata={})
    part = write_part(store, facts, "w", specs, layout, lambda key: memory_of(tensors[key]), {})
    if finish:
        commit(store, [part])


def file_of(store: Store, step: int) -> Path:
    return Path(store.url) / folder_of(step) / f"w-a{step}.safetensors"


def flip_a_bit(store: Store, step: int, name: str = "weight") -> None:
    entry = open_checkpoint(store, step).manifest.tensors[f"model/{name}"]
    data = bytearray(file_of(store, step).read_bytes())
    data[entry.first] ^= 1
    file_of(store, step).write_bytes(data)


# ---------------------------------------------------------------- ls


def broken_store(store: Store) -> None:
    """1 and 2 complete, 3 truncated, 4 interrupted, 5 newer than this library."""
    for step in (1, 2, 3, 5):
        save(store, step)
    save(store, 4, finish=False)
    file_of(store, 3).write_bytes(file_of(store, 3).read_bytes()[:-1])
    manifest = Path(store.url) / folder_of(5) / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))


def test_ls_shows_the_state_of_each_checkpoint_and_the_newest_complete_one(cli: Cli, store: Store) -> None:
    """V37: interrupted, truncated and newer-format checkpoints never count as complete."""
    broken_store(store)
    assert cli("checkpoint", "ls", store.url) == 0
    lines = [" ".join(line.split()) for line in cli.out.splitlines()]
    size = format_bytes(file_of(store, 1).stat().st_size)
    assert lines[:6] == [
        "step iteration state size tensors layout created job",
        f"1 1 complete {size} 2 2 x 2, batch 64 2031-01-01T00:00:00Z job-7",
        f"2 2 complete, newest {size} 2 2 x 2, batch 64 2031-01-01T00:00:00Z job-7",
        f"3 3 broken {size} 2 2 x 2, batch 64 2031-01-01T00:00:00Z job-7",
        "4 - interrupted - - - - -",
        "5 - broken - - - - -",
    ]
    assert lines[6].startswith("3: w-a3.safetensors has ")
    assert lines[7] == "4: its save was interrupted: it has no manifest"
    assert "has version 99" in lines[8] and len(lines) == 9


def test_ls_prints_json(cli: Cli, store: Store) -> None:
    broken_store(store)
    assert cli("checkpoint", "ls", store.url, "--json") == 0
    listing = json.loads(cli.out)
    assert (listing["store"], listing["newest"]) == (store.url, 2)
    rows = listing["checkpoints"]
    assert [row["state"] for row in rows] == ["complete", "complete", "broken", "interrupted", "broken"]
    assert [row["step"] for row in rows if row["newest"]] == [2]
    assert rows[1] == {
        "step": 2,
        "state": "complete",
        "newest": True,
        "problem": "",
        "iteration": 2,
        "num_bytes": file_of(store, 2).stat().st_size,
        "num_tensors": 2,
        "replicas": [2, 2],
        "batch_size": 64,
        "created": "2031-01-01T00:00:00Z",
        "job": "job-7",
    }


def test_ls_of_an_empty_store_is_no_error(cli: Cli, tmp_path: Path) -> None:
    assert cli("checkpoint", "ls", tmp_path) == 0
    assert cli.out == f"{tmp_path} holds no checkpoints\n"
    assert cli("checkpoint", "ls", tmp_path, "--json") == 0
    assert json.loads(cli.out) == {"store": str(tmp_path), "newest": None, "checkpoints": []}


def test_verify_shows_a_progress_bar_on_a_terminal(store: Store) -> None:
    save(store, 1)
    seen = on_a_terminal("checkpoint", "verify", store.url)
    assert "reading" in seen and "checkpoint 1: intact" in seen


# ---------------------------------------------------------------- verify


def test_verify_reads_the_newest_complete_checkpoint_or_a_given_step_or_all(cli: Cli, store: Store) -> None:
    for step in (1, 2, 3):
        save(store, step)
    assert cli("checkpoint", "verify", store.url) == 0
    assert cli.out.startswith("checkpoint 3: intact, 2 tensors, ") and cli.err == ""
    assert cli("checkpoint", "verify", store.url, 1) == 0
    assert cli.out.startswith("checkpoint 1: intact")
    assert cli("checkpoint", "verify", store.url, "--all") == 0
    assert [line.split(",")[0] for line in cli.out.splitlines()] == [
        f"checkpoint {step}: intact" for step in (1, 2, 3)
    ]
    save(store, 4, finish=False)
    assert cli("checkpoint", "verify", store.url) == 0
    assert cli.out.splitlines()[1].startswith("note: checkpoint 4 is newer, but not complete: its save was")
    assert cli("checkpoint", "verify", store.url, 1, "--all") == 1
    assert "exclude each other" in cli.err


def test_verify_names_every_damaged_tensor_and_the_newest_complete_checkpoint(cli: Cli, store: Store) -> None:
    """V37: the message names what is missing or broken and the newest complete one."""
    for step in (1, 2, 3):
        save(store, step)
    flip_a_bit(store, 3, "weight")
    flip_a_bit(store, 3, "bias")
    damaged = "in w-a3.safetensors is damaged: its bytes do not match their hash"
    assert cli("checkpoint", "verify", store.url) == 1
    assert cli.out.splitlines()[0] == "checkpoint 3: broken"
    assert sorted(cli.out.splitlines()[1:]) == [f"  'model/bias' {damaged}", f"  'model/weight' {damaged}"]
    assert cli.err == (
        "varuna: 1 of 1 verified is broken; the newest complete checkpoint is step 2 "
        "(its sizes are right; its bytes were not read)\n"
    )


def test_verify_all_names_the_problems_of_each_checkpoint(cli: Cli, store: Store) -> None:
    """V37, with every kind of damage in one store. The rest of a broken checkpoint is read too."""
    broken_store(store)
    flip_a_bit(store, 2)
    save(store, 6)
    file_of(store, 6).unlink()
    assert cli("checkpoint", "verify", store.url, "--all") == 1
    assert [line for line in cli.out.splitlines() if line.startswith("checkpoint")] == [
        f"checkpoint 1: intact, 2 tensors, {format_bytes(file_of(store, 1).stat().st_size)}",
        *(f"checkpoint {step}: broken" for step in (2, 3, 4, 5, 6)),
    ]
    for told in (
        "'model/weight' in w-a2",
        "bytes instead of",
        "no manifest",
        "version 99",
        "w-a6.safetensors is",
    ):
        assert told in cli.out
    assert cli.err == "varuna: 5 of 6 verified are broken; the newest complete checkpoint is step 1\n"


def test_verify_detects_a_damaged_header(cli: Cli, store: Store) -> None:
    save(store, 1)
    data = bytearray(file_of(store, 1).read_bytes())
    data[20] ^= 1
    file_of(store, 1).write_bytes(data)
    assert cli("checkpoint", "verify", store.url) == 1
    assert "w-a1.safetensors: the header is damaged" in cli.out
    assert "no complete checkpoint is left" in cli.err


def test_verify_without_a_checkpoint_is_an_error(cli: Cli, store: Store, tmp_path: Path) -> None:
    assert cli("checkpoint", "verify", tmp_path) == 1
    assert cli.err == f"varuna: {tmp_path} has no complete checkpoint\n"
    assert cli("checkpoint", "verify", tmp_path, "--all") == 1
    assert cli.err == f"varuna: {tmp_path} holds no checkpoints\n"
    save(store, 1)
    assert cli("checkpoint", "verify", store.url, 8) == 1
    assert "it does not exist" in cli.out and "the newest complete checkpoint is step 1" in cli.err


# ---------------------------------------------------------------- export and import


def test_an_exported_model_can_be_imported_again(cli: Cli, store: Store, tmp_path: Path) -> None:
    """V38."""
    save(store, 1)
    save(store, 2, {name: tensor + 1 for name, tensor in STATE.items()})
    assert cli("checkpoint", "export", store.url, tmp_path / "x.pt", "--step", 1) == 0
    assert cli.out.startswith(f"checkpoint 1 of {store.url} -> {tmp_path}/x.pt: ")
    assert cli("checkpoint", "import", tmp_path / "x.pt", store.url) == 0
    assert cli.out.splitlines()[0].startswith(f"{tmp_path}/x.pt -> checkpoint 0 of {store.url}: 2 tensors, ")
    assert cli.out.splitlines()[1] == "note: the newest complete checkpoint of this store is step 2"
    folder = tmp_path / "folder"
    assert cli("checkpoint", "export", "--step", 0, store.url, folder, "--max-shard-size", "20") == 0
    assert len(os.listdir(folder)) == 3
    assert cli("checkpoint", "import", folder, store.url, "--step", 9) == 0
    assert cli("checkpoint", "export", store.url, tmp_path / "y.safetensors", "--dtype", "bfloat16") == 0
    for name, tensor in load_file(tmp_path / "y.safetensors").items():
        assert torch.equal(tensor, STATE[name].bfloat16())
    assert cli("checkpoint", "verify", store.url, "--all") == 0


def test_existing_data_is_not_overwritten_without_the_flag(cli: Cli, store: Store, tmp_path: Path) -> None:
    save(store, 1)
    save_file(STATE, tmp_path / "x.safetensors")
    assert cli("checkpoint", "export", store.url, tmp_path / "x.safetensors") == 1
    assert "already exists" in cli.err and cli.err.count("\n") == 1
    assert cli("checkpoint", "export", store.url, tmp_path / "x.safetensors", "--overwrite") == 0
    assert cli("checkpoint", "import", tmp_path / "x.safetensors", store.url, "--step", 1) == 1
    assert "already has a checkpoint of step 1 (complete" in cli.err
    assert cli("checkpoint", "import", tmp_path / "x.safetensors", store.url, "--step", 1, "--overwrite") == 0


def test_a_broken_checkpoint_is_not_exported(cli: Cli, store: Store, tmp_path: Path) -> None:
    """V37."""
    save(store, 1)
    save(store, 2)
    flip_a_bit(store, 2)
    assert cli("checkpoint", "export", store.url, tmp_path / "x.pt") == 1
    assert cli.err == (
        f"varuna: checkpoint 2 in {store.url}: 'model/weight' in w-a2.safetensors is damaged: its bytes "
        "do not match their hash (the newest complete step is 1)\n"
    )
    assert os.listdir(tmp_path) == ["store"]


def test_import_into_the_store_of_a_running_job_is_refused(cli: Cli, store: Store, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "x.safetensors")
    claim = store.claim(Owner("running", "t", "there", 2))
    assert cli("checkpoint", "import", tmp_path / "x.safetensors", store.url) == 1
    assert "is claimed by job running" in cli.err
    claim.release()
    assert cli("checkpoint", "import", tmp_path / "x.safetensors", store.url) == 0


def test_all_commands_work_on_a_remote_store(cli: Cli, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "x.safetensors")
    assert cli("checkpoint", "import", tmp_path / "x.safetensors", "memory://cli/store") == 0
    assert cli("checkpoint", "verify", "memory://cli/store") == 0
    assert cli("checkpoint", "ls", "memory://cli/store") == 0 and "complete, newest" in cli.out
    assert cli("checkpoint", "export", "memory://cli/store", tmp_path / "y.pt") == 0
    for name, tensor in torch.load(tmp_path / "y.pt").items():
        assert torch.equal(tensor, STATE[name])


def test_ls_and_verify_need_no_torch(store: Store) -> None:
    save(store, 1)
    run_without_torch([["checkpoint", "ls", store.url], ["checkpoint", "verify", store.url, "--all"]])


@pytest.mark.parametrize("url", ["nonsense://x/y", "s3:/x://y", ""])
def test_an_invalid_url_is_reported_in_one_line(cli: Cli, url: str) -> None:
    assert cli("checkpoint", "ls", url) == 1
    assert cli.err.count("\n") == 1 and cli.out == ""
