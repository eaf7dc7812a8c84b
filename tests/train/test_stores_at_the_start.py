"""A job says at its start where it resumes from, and warns if it cannot save."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.tasks import logged
from varuna import Varuna
from varuna.environment import variable_name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


INPUTS = {"x": torch.ones(2, 4)}


def wrap() -> Varuna:
    model = Varuna(Net(), "0", INPUTS, 2, 1, device="cpu")
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def resumed_from(place: Path) -> list[str]:
    model = wrap()
    with logged() as lines:
        assert model.resume(place) == 0
    model.close()
    return lines


def test_resume_says_what_it_found_at_a_place_without_checkpoints(tmp_path: Path) -> None:
    (line,) = resumed_from(tmp_path / "missing")
    assert (
        line
        == f"no checkpoint in {tmp_path / 'missing'}: the folder does not exist. Training starts at step 0"
    )
    (tmp_path / "empty").mkdir()
    assert "it is empty" in resumed_from(tmp_path / "empty")[0]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.pt").touch()
    assert "it has no complete checkpoint, only weights.pt" in resumed_from(tmp_path / "other")[0]


def test_resume_warns_of_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    place = tmp_path / "a_file"
    place.write_text("no folder")
    problem, found = resumed_from(place)
    assert "it is a file, not a folder" in found
    assert "checkpoints cannot be saved to " in problem and str(place) in problem


def test_a_resumed_job_says_nothing_of_the_sort(tmp_path: Path) -> None:
    model = wrap()
    model.step(INPUTS)
    model.checkpoint(tmp_path)
    model.close()
    model = wrap()
    with logged() as lines:
        assert model.resume(tmp_path) == 1
    model.close()
    assert not [line for line in lines if "no checkpoint in" in line or "cannot be saved" in line]


def test_a_managed_job_without_a_store_warns_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable_name("agent_socket"), "nobody")
    for has_store in (False, True):
        model = wrap()
        with logged() as lines:
            if has_store:
                model.resume(tmp_path)
            model.step(INPUTS)
            model.step(INPUTS)
        model.close()
        assert sum("this job has no checkpoint store" in line for line in lines) == (not has_store)
