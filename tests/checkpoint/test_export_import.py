"""A trained model leaves a job as a file, and a file starts a job."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import varuna.train.build
from tests.checkpoint.legs import STEPS, make_optimizer, train_in_one_go, train_leg
from tests.pool import Pool
from tests.tasks import SEED, RememberingSource, global_batch, stage_map
from tests.toys import make_inputs, make_model
from varuna import Varuna
from varuna.capture import Source
from varuna.checkpoint.format.manifest import Facts
from varuna.checkpoint.load import open_checkpoint
from varuna.checkpoint.store.store import Owner, open_store
from varuna.checkpoint.transfer import export, import_state, read_source

DTYPE = torch.float64
OPTIONS: dict[str, Any] = {"dropout": 0.0}


@pytest.fixture(scope="module")
def trained(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Return the store and the state of two stages after two steps."""
    store = tmp_path_factory.mktemp("trained")
    leg = {"chunk": 2, "first": 0, "stop": 2, "store": str(store), "model_options": OPTIONS}
    return store, pool.run(train_leg, 2, "GPT", 2, 1, **leg)[0]["state"]


def start_from(store: str, depth: int, width: int) -> tuple[int, dict[str, Tensor]]:
    """Return the iteration and the state of a job that loads an imported checkpoint."""
    varuna.train.build.Source = RememberingSource  # type: ignore[misc]
    RememberingSource.toy = ("GPT", DTYPE, str(OPTIONS))
    sample = make_inputs("GPT", 2, torch.Generator().manual_seed(1), DTYPE)
    model = make_model("GPT", seed=SEED + 1, dtype=DTYPE, **OPTIONS)
    wrapped = Varuna(model, stage_map(depth, width), sample, 6, 2, device="cpu", timeout_seconds=30)
    wrapped.set_optimizer(make_optimizer(wrapped.parameters())[0])
    iteration = wrapped.resume(store)
    state = wrapped.full_state_dict()
    wrapped.close()
    varuna.train.build.Source = Source  # type: ignore[misc]
    return iteration, state


@pytest.mark.parametrize("form", ["x.pt", "folder"])
def test_a_job_leaves_a_file_and_a_file_starts_a_job(
    form: str, trained: tuple[Path, dict[str, Tensor]], pool: Pool, tmp_path: Path
) -> None:
    """V38: two stages trained it, one process reads it, two replicas start from it."""
    store, expected = trained
    export(open_checkpoint(open_store(str(store)), None), tmp_path / form, max_shard_bytes=2000)
    state = read_source(tmp_path / form)
    plain = make_model("GPT", seed=SEED + 1, dtype=DTYPE, **OPTIONS)
    plain.load_state_dict(state, strict=form == "x.pt")
    torch.testing.assert_close(dict(plain.state_dict()), expected, rtol=0, atol=0)
    other = open_store(str(tmp_path / "other"))
    import_state(other, state, Facts(0, 0, "a", ""), Owner("job", "token", "here", 1))
    for iteration, found in pool.run(start_from, 2, other.url, 1, 2):
        assert iteration == 0
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_plain_torch_goes_on_where_the_job_stopped(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    """V38: with the optimizer's state in the file, the losses are those of one process from the start."""
    export(open_checkpoint(open_store(str(trained[0])), 2), tmp_path / "x.pt", with_optimizer=True)
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    model = make_model("GPT", seed=SEED + 1, dtype=DTYPE, **OPTIONS)
    model.load_state_dict(found["model"])
    optimizer, scheduler = make_optimizer(model.parameters())
    for _ in range(found["iteration"]):
        scheduler.step()
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    losses = []
    for step in range(found["iteration"], STEPS):
        loss = model(**global_batch("GPT", step, 6, DTYPE))
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    expected = train_in_one_go("GPT", model_options=OPTIONS)["losses"][2:]
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
