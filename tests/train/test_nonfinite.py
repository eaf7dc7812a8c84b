"""A loss that is NaN or infinite is reported with its step and stage; on request it stops or is skipped."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.tasks import logged, stage_map
from tests.train.faces import LAYOUTS
from varuna import CutPoint, Varuna
from varuna.errors import ScriptError

BAD_STEP = 2


class Logarithm(nn.Module):
    """The second half takes the logarithm of an input, and its BatchNorm sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), CutPoint()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, positive: Tensor) -> Tensor:
        x = self.cut(torch.tanh(self.first(x)))
        return self.norm(self.last(x) + positive.log()).square().mean()


class WithoutNorm(Logarithm):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()


def batch_of(step: int, bad: bool) -> dict[str, Tensor]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    positive = torch.ones(8, 1)
    if bad:
        positive[5] = -1  # of the last replica
    return {"x": x, "positive": positive}


def train(
    depth: int, width: int, mode: str, steps: list[int], mapping: str = ""
) -> tuple[dict[str, Any], list[str], list[bool]]:
    torch.manual_seed(3)
    sample = {name: value[:2] for name, value in batch_of(0, False).items()}
    options: Any = {"device": "cpu", "timeout_seconds": 30, "on_nan": mode}
    model = WithoutNorm() if mapping else Logarithm()
    wrapped = Varuna(model, mapping or stage_map(depth, width), sample, 8, 2, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    wrapped.set_optimizer(optimizer)
    overflows = []
    with logged() as lines:
        for step in steps:
            batch = batch_of(step, step == BAD_STEP)
            replica, count = wrapped.rank_within_stage, wrapped.data_depth
            own = {name: value.chunk(count)[replica] for name, value in batch.items()}
            overflows.append(wrapped.step(own)[1])
            optimizer.step()
            wrapped.zero_grad()
    state = wrapped.full_state_dict()
    wrapped.close()
    return state, [line for line in lines if "the loss of step" in line], overflows


@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_a_nan_loss_is_reported_with_step_and_stage(pool: Pool, depth: int, width: int) -> None:
    """The default: training goes on, with a warning on the first rank."""
    found = pool.run(train, depth * width, depth, width, "warn", [0, 1, BAD_STEP])
    (line,) = found[0][1]
    assert line.startswith("the loss of step 2 is nan: the outputs of stage ")
    assert f"stage {depth - 1} are the first" in line and f"of replica {width - 1}" in line
    assert not any(lines for _, lines, _ in found[1:])


def test_the_stage_is_found_if_stages_differ_in_their_replicas(pool: Pool) -> None:
    (line,) = pool.run(train, 3, 2, 0, "warn", [0, BAD_STEP], "0,1;2;")[0][1]
    assert "the loss of step 1 is nan: the outputs of stage 1 are the first" in line


@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_a_skipped_step_leaves_no_trace(pool: Pool, depth: int, width: int) -> None:
    """Parameters, momentum and BatchNorm's statistics are those of a run without this step."""
    _, _, overflows = pool.run(train, depth * width, depth, width, "skip", [0, 1, BAD_STEP, 3])[0]
    assert overflows == [False, False, True, False]
    expected = pool.run(train, depth * width, depth, width, "skip", [0, 1, 3])[0][0]
    for state, _, _ in pool.run(train, depth * width, depth, width, "skip", [0, 1, BAD_STEP, 3]):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)


def stop(depth: int, width: int) -> str:
    with pytest.raises(FloatingPointError) as error:
        train(depth, width, "stop", [0, BAD_STEP])
    assert isinstance(error.value, ScriptError)
    return str(error.value)


@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_stop_raises_the_same_error_on_all_ranks(pool: Pool, depth: int, width: int) -> None:
    messages = pool.run(stop, depth * width, depth, width)
    assert len(set(messages)) == 1 and f"outputs of stage {depth - 1} are the first" in messages[0]


def test_an_unknown_reaction_is_refused() -> None:
    with pytest.raises(ValueError, match="on_nan must be one of warn, stop, skip"):
        Varuna(Logarithm(), "0", {}, 8, 2, device="cpu", on_nan="ignore")  # type: ignore[arg-type]
