"""A call that only some ranks make is named within seconds, with each rank's call, in both interfaces."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import Pool
from tests.train.faces import LAYOUTS, play
from varuna import CutPoint
from varuna.errors import CallMismatch, ScriptError

Run = Callable[[int], float]
SECONDS = 30.0
"""Of the timeout in these tests: much longer than a mismatch takes to be found."""


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), CutPoint()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.cut(torch.tanh(self.first(x))))).square().mean()


class Dropping(Net):
    """Replicas exchange their numbers of samples at the start of a step."""

    def __init__(self) -> None:
        super().__init__(0.5)


def message_of(action: Callable[[], object]) -> str:
    started = time.monotonic()
    with pytest.raises(CallMismatch) as error:
        action()
    assert isinstance(error.value, ScriptError)
    assert time.monotonic() - started < SECONDS
    return str(error.value)


def on_first_rank_only(call: Callable[[Any], object], run: Run, model: Any) -> str:
    def go_on() -> None:
        if dist.get_rank() == 0:
            call(model)
        for step in range(2, 5):
            run(step)

    return message_of(go_on)


def evaluate_on_rank_0(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> str:
    run(0)
    run(1)
    return on_first_rank_only(lambda model: model.evaluate({"x": torch.ones(4, 6)}), run, model)


def checkpoint_on_rank_0(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> str:
    run(0)
    return on_first_rank_only(lambda model: model.checkpoint(Path("/nowhere")), run, model)


def state_on_rank_0(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> str:
    run(0)
    return on_first_rank_only(lambda model: model.state_dict(), run, model)


def parameter_on_rank_0(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> str:
    run(0)
    return on_first_rank_only(lambda model: model.get_param("first.weight"), run, model)


def two_different_calls(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> str:
    run(0)
    return message_of(model.full_state_dict if dist.get_rank() == 0 else model.timeline)


def abandoned(face: str, depth: int, width: int, make: Any, script: Any) -> str:
    """Run a script that ends in the middle of a call."""
    found: list[str] = []

    def remember(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> None:
        found.append(script(model, optimizer, run))
        raise InterruptedError

    with pytest.raises(InterruptedError):
        play(face, depth, width, make, remember)
    return found[0]


@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
@pytest.mark.parametrize(
    ("face", "make", "script", "name"),
    [
        ("varuna", Net, evaluate_on_rank_0, "evaluate"),
        ("varuna", Dropping, evaluate_on_rank_0, "evaluate"),
        ("varuna", Net, checkpoint_on_rank_0, "checkpoint"),
        ("pyrannc", Net, state_on_rank_0, "state_dict"),
        ("pyrannc", Net, parameter_on_rank_0, "get_param"),
    ],
)
def test_a_call_on_rank_0_only_is_named_on_all_ranks(
    pool: Pool, face: str, make: Any, script: Any, name: str, depth: int, width: int
) -> None:
    """EXA-9"""
    other = "step" if face == "varuna" else "forward"
    for message in pool.run(abandoned, depth * width, face, depth, width, make, script):
        assert f"rank 0 is in {name}(), rank " in message and f" in {other}()" in message
        assert "call it on all ranks" in message
    pool.close()  # the ranks gave up in the middle of a collective


def test_two_calls_that_announce_themselves_are_named_at_once(pool: Pool) -> None:
    """EXA-9"""
    for message in pool.run(abandoned, 2, "varuna", 2, 1, Net, two_different_calls):
        assert "rank 0 is in full_state_dict(), rank 1 in timeline()" in message
    pool.close()
