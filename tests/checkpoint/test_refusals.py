"""Failed saves and loads: all ranks raise the same error with a name, and nothing is lost."""

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.pool import Pool
from tests.tasks import stage_map
from tests.toys import Plain, make_inputs
from varuna import Varuna, newest_checkpoint
from varuna.checkpoint.load import all_checkpoints
from varuna.checkpoint.save import commit
from varuna.checkpoint.store.store import open_store
from varuna.errors import CheckpointError, StoreTaken
from varuna.train.saving import checkpoints as checkpointing

BATCH = 4


def wrap(model: nn.Module | None = None, depth: int = 1, width: int = 1, **options: Any) -> Varuna:
    inputs = make_inputs("Plain", 2, torch.Generator())
    wrapped = Varuna(
        model or make(), stage_map(depth, width), inputs, BATCH, 2, device="cpu", seed=1, **options
    )
    wrapped.set_optimizer(torch.optim.AdamW(wrapped.parameters(), lr=0.1))
    return wrapped


def make(**options: Any) -> Plain:
    torch.manual_seed(0)
    return Plain(layers=3, **options)


def train(wrapped: Varuna, steps: int = 1) -> float:
    loss = 0.0
    for _ in range(steps):
        inputs = make_inputs("Plain", wrapped.batch_size, torch.Generator().manual_seed(wrapped.iteration))
        loss, _ = wrapped.step(inputs)
        assert wrapped._optimizer is not None
        wrapped._optimizer.step()
        wrapped.zero_grad()
    return loss


def state_of(wrapped: Varuna) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_that_is_not_there_is_refused_with_the_newest_that_is(tmp_path: Path) -> None:
    """V37"""
    wrapped = wrap()
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        wrapped.load_checkpoint(tmp_path)
    assert wrapped.resume(tmp_path) == 0
    train(wrapped, 2)
    wrapped.checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path) == 2
    with pytest.raises(CheckpointError, match=r"does not exist \(the newest complete step is 2\)"):
        wrapped.load_checkpoint(tmp_path, 1)
    wrapped.close()


def test_resuming_takes_the_newest_complete_one(tmp_path: Path) -> None:
    wrapped = wrap()
    for _ in range(3):
        train(wrapped)
        wrapped.checkpoint(tmp_path)
    (tmp_path / "varuna_ckpt_3" / "manifest.json").unlink()
    expected = train(wrapped)
    wrapped.close()
    other = wrap()
    assert other.resume(tmp_path) == 2
    train(other)
    assert train(other) == expected
    other.close()


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest"])
def test_a_broken_checkpoint_changes_nothing(harm: str, tmp_path: Path) -> None:
    """V37: neither parameters nor the optimizer, though part of it was read already."""
    wrapped = wrap()
    train(wrapped)
    wrapped.checkpoint(tmp_path)
    train(wrapped)
    before = state_of(wrapped)
    (file,) = (tmp_path / "varuna_ckpt_1").glob("*.safetensors")
    if harm == "flip":
        flip(file, -1)
    elif harm == "truncate":
        os.truncate(file, file.stat().st_size - 1)
    elif harm == "remove":
        file.unlink()
    else:
        flip(file.with_name("manifest.json"), 300)
    with pytest.raises(CheckpointError):
        wrapped.load_checkpoint(tmp_path, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrapped.state_dict().items())
    assert wrapped.iteration == 2
    train(wrapped)
    wrapped.close()


def test_another_model_is_refused_by_the_names_that_differ(tmp_path: Path) -> None:
    """V37, V7: names, shapes and dtypes."""
    saved = wrap()
    saved.checkpoint(tmp_path)
    saved.close()
    torch.manual_seed(0)
    deeper = wrap(Plain(layers=4))
    with pytest.raises(CheckpointError, match=r"has no layers\.3\.weight, layers\.3\.bias"):
        deeper.load_checkpoint(tmp_path, 0)
    deeper.load_checkpoint(tmp_path, 0, strict=False)
    deeper.close()
    shallower = wrap(Plain(layers=2))
    with pytest.raises(CheckpointError, match=r"another model: this model has no layers\.2"):
        shallower.load_checkpoint(tmp_path, 0)
    shallower.close()
    wider = wrap_wider()
    with pytest.raises(CheckpointError, match=r"shape \[7, 7\] in the checkpoint and \[8, 8\]"):
        wider.load_checkpoint(tmp_path, 0)
    wider.close()


def wrap_wider() -> Varuna:
    inputs = {"x": torch.zeros(2, 8), "y": torch.zeros(2, 8)}
    wrapped = Varuna(Plain(layers=3, width=8), "0;", inputs, BATCH, 2, device="cpu")
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    return wrapped


def test_another_kind_of_optimizer_is_refused_by_what_it_has(tmp_path: Path) -> None:
    """V37: its state would be mixed with the new one's, or fail in a later step."""
    saved = wrap()
    train(saved)
    saved.checkpoint(tmp_path)
    saved.close()
    other = wrap()
    optimizer = torch.optim.RMSprop(other.parameters(), lr=0.3)
    other.set_optimizer(optimizer)
    with pytest.raises(CheckpointError, match=r"another optimizer class than RMSprop: it has amsgrad, betas"):
        other.load_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path, strict=False)
    assert other.iteration == 1 and optimizer.param_groups[0]["lr"] == 0.3
    train(other)
    other.close()


def test_another_dtype_is_converted_only_with_cast(tmp_path: Path) -> None:
    saved = wrap()
    saved.checkpoint(tmp_path)
    inputs = make_inputs("Plain", 2, torch.Generator(), torch.float64)
    double = Varuna(make().double(), "0;", inputs, BATCH, 2, device="cpu")
    double.set_optimizer(torch.optim.AdamW(double.parameters()))
    with pytest.raises(CheckpointError, match=r"is float32 in the checkpoint and float64 in the model"):
        double.load_checkpoint(tmp_path, 0)
    double.load_checkpoint(tmp_path, 0, cast=True)
    for name, tensor in saved.state_dict().items():
        assert torch.equal(double.state_dict()[name], tensor.double())
    saved.close()
    double.close()


def test_an_optimizer_that_comes_after_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """V36: it would quietly start afresh."""
    wrapped = wrap()
    train(wrapped)
    wrapped.checkpoint(tmp_path)
    wrapped.close()
    other = Varuna(make(), "0;", make_inputs("Plain", 2, torch.Generator()), BATCH, 2, device="cpu")
    other.load_checkpoint(tmp_path, 1)
    with pytest.raises(RuntimeError, match="set_optimizer before load_checkpoint"):
        other.set_optimizer(torch.optim.AdamW(other.parameters()))
    other.close()


def test_what_is_registered_late_gets_its_state_at_once(tmp_path: Path) -> None:
    wrapped = wrap()
    assert wrapped._optimizer is not None
    scheduler = torch.optim.lr_scheduler.MultiStepLR(wrapped._optimizer, [1, 3])
    wrapped.register("scheduler", scheduler)
    train(wrapped)
    scheduler.step()
    wrapped.checkpoint(tmp_path)
    with pytest.raises(ValueError, match="already registered as 'scheduler'"):
        wrapped.register("scheduler", scheduler)
    wrapped.close()
    other = wrap()
    other.load_checkpoint(tmp_path, 1)
    assert other._optimizer is not None
    late = torch.optim.lr_scheduler.MultiStepLR(other._optimizer, [1, 3])
    other.register("scheduler", late)
    assert late.state_dict() == scheduler.state_dict()
    other.close()


def test_hyper_parameters_come_back_and_how_to_compute_does_not(tmp_path: Path) -> None:
    """V36: each group's own, changed in the middle of the run."""

    def wrap_grouped(lr: float, **how: Any) -> tuple[Varuna, torch.optim.Optimizer]:
        wrapped = Varuna(make(), "0;", make_inputs("Plain", 2, torch.Generator()), BATCH, 2, device="cpu")
        named = list(wrapped.named_parameters())
        groups = [
            {"params": [p for n, p in named if "weight" in n], "weight_decay": lr},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=lr, **how)
        wrapped.set_optimizer(optimizer)
        return wrapped, optimizer

    wrapped, optimizer = wrap_grouped(0.1, foreach=True)
    train(wrapped)
    optimizer.param_groups[1]["lr"] = 0.025
    wrapped.checkpoint(tmp_path)
    wrapped.close()
    other, fresh = wrap_grouped(0.5, foreach=False)
    other.load_checkpoint(tmp_path, 1)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.025]
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.1, 0.0]
    assert all(group["foreach"] is False for group in fresh.param_groups)
    other.close()
    mixed = wrap()
    with pytest.raises(CheckpointError, match="trained in two groups"):
        mixed.load_checkpoint(tmp_path, 1)
    mixed.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"step": -1}, "a whole number, 0 or more, not -1"), ({"keep_last": 0}, "keep_last must be 1 or more")],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    wrapped = wrap()
    with pytest.raises(ValueError, match=message):
        wrapped.checkpoint(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []
    wrapped.close()


def test_a_second_job_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    """V35: while the first lives; then it may."""
    first, second = wrap(), wrap()
    first.checkpoint(tmp_path)
    with pytest.raises(StoreTaken, match="is claimed by job"):
        second.checkpoint(tmp_path)
    first.checkpoint(tmp_path, 1)
    first.close()
    second.checkpoint(tmp_path, 2)
    second.close()


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    wrapped = wrap()
    for step in range(5):
        wrapped.checkpoint(tmp_path, step, keep_last=2)
    assert [found.step for found in all_checkpoints(open_store(str(tmp_path)))] == [3, 4]
    wrapped.close()


def test_old_checkpoints_that_cannot_be_removed_do_not_fail_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V35: it is there by then."""
    wrapped = wrap()
    monkeypatch.setattr(checkpointing, "remove_old", fail_for_want_of_rights)
    wrapped.checkpoint(tmp_path, keep_last=1)
    assert "checkpoint 0 is saved, but old ones were not removed" in caplog.text
    assert wrapped.load_checkpoint(tmp_path) == 0
    wrapped.close()


def test_where_the_manifest_may_have_been_written_the_parts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V37: a store that fails after the fact leaves a whole checkpoint, not a broken one."""
    wrapped = wrap()

    def commit_and_fail(*args: Any) -> None:
        commit(*args)
        fail_for_want_of_rights()

    monkeypatch.setattr(checkpointing, "commit", commit_and_fail)
    with pytest.raises(CheckpointError, match="checkpoint 0 was not written"):
        wrapped.checkpoint(tmp_path)
    assert wrapped.load_checkpoint(tmp_path) == 0
    wrapped.close()


def fail_for_want_of_rights(*args: Any, **options: Any) -> None:
    raise PermissionError("not permitted")


# ---------------------------------------------------------------- over several ranks


def on_each_rank(pool: Pool, task: Callable[..., Any], tmp_path: Path) -> list[Any]:
    return pool.run(task, 4, str(tmp_path))


def test_a_full_disk_of_one_rank_is_an_error_on_all_and_training_continues(
    pool: Pool, tmp_path: Path
) -> None:
    """V37: nothing of it is left, the one before stays, and the next one works."""
    messages = on_each_rank(pool, fill_the_disk_of_one, tmp_path)
    assert len(set(messages)) == 1
    assert "checkpoint 2 was not written: rank 3 (stage 1, replica 1): " in messages[0]
    assert [found.step for found in all_checkpoints(open_store(str(tmp_path)))] == [1, 3]
    assert not any(found.problem for found in all_checkpoints(open_store(str(tmp_path))))


def fill_the_disk_of_one(store: str) -> str:
    wrapped = wrap(depth=2, width=2)
    train(wrapped)
    wrapped.checkpoint(store, shard=True)
    train(wrapped)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    with pytest.raises(CheckpointError) as refused:
        wrapped.checkpoint(store, shard=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    train(wrapped)
    wrapped.checkpoint(store, shard=True)
    wrapped.close()
    return str(refused.value)


def test_damage_to_one_stage_keeps_all_from_loading(pool: Pool, tmp_path: Path) -> None:
    """V37: no rank goes on with half of a model."""
    for message, unchanged in on_each_rank(pool, load_with_one_stage_damaged, tmp_path):
        assert "(stage 1, replica 0)" in message and "is damaged" in message
        assert unchanged


def load_with_one_stage_damaged(store: str) -> tuple[str, bool]:
    wrapped = wrap(depth=2, width=2)
    train(wrapped)
    wrapped.checkpoint(store)
    if dist.get_rank() == 0:
        (file,) = Path(store, "varuna_ckpt_1").glob("stage-1-replica-0-*.safetensors")
        flip(file, -1)
    dist.barrier()
    train(wrapped)
    before = state_of(wrapped)
    with pytest.raises(CheckpointError) as refused:
        wrapped.load_checkpoint(store, 1)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in wrapped.state_dict().items())
    train(wrapped)
    wrapped.close()
    return str(refused.value), unchanged


def test_an_interrupted_save_loads_on_request_with_what_it_has(pool: Pool, tmp_path: Path) -> None:
    """V36: check_complete=False; the other stage keeps what it has."""
    on_each_rank(pool, load_an_interrupted_one, tmp_path)


def load_an_interrupted_one(store: str) -> None:
    wrapped = wrap(depth=2, width=2)
    train(wrapped)
    wrapped.checkpoint(store)
    saved = state_of(wrapped)
    if dist.get_rank() == 0:
        folder = Path(store, "varuna_ckpt_1")
        (folder / "manifest.json").unlink()
        for part in folder.glob("stage-1-*"):
            part.unlink()
    dist.barrier()
    train(wrapped)
    moved = state_of(wrapped)
    with pytest.raises(CheckpointError, match="interrupted"):
        wrapped.load_checkpoint(store, 1)
    wrapped.load_checkpoint(store, 1, check_complete=False)
    expected = saved if wrapped.stage == 0 else moved
    assert all(torch.equal(tensor, expected[name]) for name, tensor in wrapped.state_dict().items())
    wrapped.close()


def test_a_state_that_differs_between_ranks_is_refused(pool: Pool, tmp_path: Path) -> None:
    """V36: it could not be given back to other ranks."""
    for message in on_each_rank(pool, register_something_of_this_rank, tmp_path):
        assert "registered as 'mine' has different states on different ranks" in message
    for message in pool.run(register_on_one_rank, 2, str(tmp_path)):
        assert "registered as 'scheduler' has different states on different ranks, or is missing" in message


def register_something_of_this_rank(store: str) -> str:
    class Mine:
        def state_dict(self) -> dict[str, int]:
            return {"rank": dist.get_rank()}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError

    wrapped = wrap(depth=2, width=2)
    wrapped.register("mine", Mine())
    with pytest.raises(CheckpointError) as refused:
        wrapped.checkpoint(store)
    train(wrapped)
    wrapped.close()
    return str(refused.value)


def register_on_one_rank(store: str) -> str:
    wrapped = wrap(depth=2)
    assert wrapped._optimizer is not None
    if wrapped.stage == 1:
        wrapped.register("scheduler", torch.optim.lr_scheduler.StepLR(wrapped._optimizer, 1))
    with pytest.raises(CheckpointError) as refused:
        wrapped.checkpoint(store)
    wrapped.close()
    return str(refused.value)


def test_each_tensor_is_written_once_and_evenly_with_shard(pool: Pool, tmp_path: Path) -> None:
    """V35: each stage its own part; with `shard` the replicas share the bytes."""
    pool.run(save_with_and_without_shard, 4, str(tmp_path))
    plain, shared = all_checkpoints(open_store(str(tmp_path)))
    assert plain.manifest is not None and shared.manifest is not None
    assert plain.manifest.tensors.keys() == shared.manifest.tensors.keys()
    assert sorted(name.split("-")[3] for name in plain.manifest.files) == ["0", "0"]
    sizes = {name.rsplit("-", 1)[0]: file.size for name, file in shared.manifest.files.items()}
    assert len(sizes) == 4
    for stage in (0, 1):
        ours = [size for name, size in sizes.items() if name.startswith(f"stage-{stage}")]
        assert max(ours) - min(ours) < 2000, "the largest unit is smaller than that"


def save_with_and_without_shard(store: str) -> None:
    wrapped = wrap(depth=2, width=2)
    train(wrapped)
    wrapped.checkpoint(store, 1)
    wrapped.checkpoint(store, 2, shard=True)
    wrapped.close()


def test_ranks_at_different_steps_cannot_save(pool: Pool, tmp_path: Path) -> None:
    """V35: a checkpoint of two moments would be none."""
    for message in pool.run(save_at_different_points, 2, str(tmp_path)):
        assert "at different steps" in message and "[(0, 0), (1, 0)]" in message


def save_at_different_points(store: str) -> str:
    wrapped = wrap(depth=2)
    with pytest.raises(CheckpointError) as refused:
        wrapped.checkpoint(store, step=dist.get_rank())
    train(wrapped)
    wrapped.close()
    return str(refused.value)


def test_the_first_stage_may_be_any_rank(pool: Pool, tmp_path: Path) -> None:
    """V36: whoever holds it looks for the checkpoint and commits it."""
    assert pool.run(save_and_load_at, 3, str(tmp_path), "2;0;1;") == [1, 1, 1]


def save_and_load_at(store: str, stage_to_rank_map: str) -> int:
    inputs = make_inputs("Plain", 2, torch.Generator())
    wrapped = Varuna(make(), stage_to_rank_map, inputs, BATCH, 2, device="cpu", seed=1)
    wrapped.set_optimizer(torch.optim.AdamW(wrapped.parameters(), lr=0.1))
    train(wrapped)
    saved = state_of(wrapped)
    wrapped.checkpoint(store)
    train(wrapped)
    step = wrapped.load_checkpoint(store)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in wrapped.state_dict().items())
    wrapped.close()
    return step


def test_a_state_that_cannot_be_saved_on_one_rank_fails_on_all(pool: Pool, tmp_path: Path) -> None:
    """V35: with the name of the rank and of the state."""
    for message in pool.run(keep_something_odd, 2, str(tmp_path)):
        assert "rank 1 (stage 1, replica 0): optimizer/layers." in message and "function" in message


def keep_something_odd(store: str) -> str:
    wrapped = wrap(depth=2)
    train(wrapped)
    assert wrapped._optimizer is not None
    if wrapped.stage == 1:
        next(iter(wrapped._optimizer.state.values()))["hook"] = lambda: None
    with pytest.raises(CheckpointError) as refused:
        wrapped.checkpoint(store)
    train(wrapped)
    wrapped.close()
    return str(refused.value)


def test_on_demand_between_accumulated_steps_the_gradients_go_along(pool: Pool, tmp_path: Path) -> None:
    """V40: the update that follows is the one that would have followed."""
    for store, map_ in ((str(tmp_path / "a"), "0;1;"), (str(tmp_path / "b"), "0,1;")):
        expected, found = pool.run(accumulate_over_a_checkpoint, 2, store, map_)[0]
        assert found == pytest.approx(expected, rel=1e-12)


def accumulate_over_a_checkpoint(store: str, stage_to_rank_map: str) -> tuple[float, float]:
    def begin() -> tuple[Varuna, Any]:
        inputs = make_inputs("Plain", 2, torch.Generator(), torch.float64)
        wrapped = Varuna(make().double(), stage_to_rank_map, inputs, BATCH, 2, device="cpu", seed=1)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
        wrapped.set_optimizer(optimizer)
        return wrapped, optimizer

    def step(wrapped: Varuna) -> float:
        seed = 10 * wrapped.iteration + wrapped.rank_within_stage
        generator = torch.Generator().manual_seed(seed)
        return wrapped.step(make_inputs("Plain", wrapped.batch_size, generator, torch.float64))[0]

    first, optimizer = begin()
    step(first)
    if dist.get_rank() == 1:
        first.on_demand_checkpoint(store)
    step(first)  # learns of it
    step(first)  # saves, with the gradients of two steps
    optimizer.step()
    first.zero_grad()
    expected = step(first)
    first.close()
    second, optimizer = begin()
    assert second.load_checkpoint(store) == 2
    step(second)
    optimizer.step()
    second.zero_grad()
    found = step(second)
    second.close()
    return expected, found


# ---------------------------------------------------------------- in the background


def test_a_second_background_save_waits_for_the_first(tmp_path: Path) -> None:
    """V35: and each holds the state of its own moment."""
    wrapped = wrap()
    expected = []
    futures = []
    for _ in range(4):
        train(wrapped)
        expected.append(state_of(wrapped))
        futures.append(wrapped.checkpoint(tmp_path, tempdir="memory"))
    wrapped.close()
    assert [Path(future.result()).name for future in futures] == [f"varuna_ckpt_{n}" for n in (1, 2, 3, 4)]
    for step, state in enumerate(expected, start=1):
        other = wrap()
        other.load_checkpoint(tmp_path, step)
        assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())
        other.close()


def test_a_failed_background_save_is_reported_and_training_goes_on(
    pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """V35: the next one works, on all ranks."""
    store = tmp_path / "store"
    errors = pool.run(fail_in_the_background, 2, str(store), str(tmp_path / "temp"))
    assert any(error for error in errors)
    assert [(found.step, found.problem) for found in all_checkpoints(open_store(str(store)))] == [
        (1, ""),
        (3, ""),
    ]


def fail_in_the_background(store: str, temp: str) -> str:
    os.makedirs(temp, exist_ok=True)
    wrapped = wrap(depth=2)
    train(wrapped)
    wrapped.checkpoint(store, tempdir=temp).result()
    dist.barrier()
    if dist.get_rank() == 0:  # where step 2 would go there is a file
        Path(store, "varuna_ckpt_2").write_text("")
    dist.barrier()
    train(wrapped)
    failed = wrapped.checkpoint(store, tempdir=temp)
    train(wrapped)
    wrapped.checkpoint(store, tempdir=temp).result()
    error = failed.exception(timeout=60)
    dist.barrier()
    wrapped.close()
    return "" if error is None else str(error)


def test_closing_waits_for_the_running_save(tmp_path: Path) -> None:
    wrapped = wrap()
    train(wrapped)
    wrapped.checkpoint(tmp_path, tempdir="memory")
    wrapped.close()
    assert newest_checkpoint(tmp_path) == 1
    shutil.rmtree(tmp_path)
