"""Plan files: written and read without loss; an invalid one is refused with the key at fault."""

from pathlib import Path

import msgspec
import pytest

from tests.plan.profiles import machines, profile, segment
from varuna.codec import decode, encode
from varuna.errors import PlanError
from varuna.plan.plan_file import PinnedPlan, read_plan, write_plan
from varuna.plan.search.search import search
from varuna.types import Plan, Proposal, StagePlan

PROPOSAL = search(profile([segment(1e-3)], [0] * 4), machines(1, 4), batch_size=16, depths=[2]).best
PINNED = PinnedPlan(*msgspec.structs.astuple(PROPOSAL), cluster=machines(1, 4))


def pin(tmp_path: Path, plan: Plan) -> Path:
    write_plan(tmp_path / "plan.json", msgspec.structs.replace(PINNED, plan=plan))
    return tmp_path / "plan.json"


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    """B3: a program that needs only the proposal can decode that."""
    path = pin(tmp_path, PINNED.plan)
    assert read_plan(path) == PINNED
    assert decode(path.read_text(), Proposal) == PROPOSAL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ()}, "`plan.stages` must have at least one stage, not none"),
        ({"batch_size": 0}, "`plan.batch_size` must be 1 or more, not 0"),
        ({"microbatch_size": -4}, "`plan.microbatch_size` must be 1 or more, not -4"),
        ({"stages": (StagePlan(1, 4, (0,)),)}, r"`plan.stages\[0\]` must start with segment 0 "),
        ({"stages": (StagePlan(0, 0, (0,)),)}, r"`plan.stages\[0\]` must start with segment 0 and have at"),
        (
            {"stages": (StagePlan(0, 2, (0,)), StagePlan(3, 4, (1,)))},
            r"`plan.stages\[1\]` must start with segment 2",
        ),
        (
            {"stages": (StagePlan(0, 2, (0, 1)), StagePlan(2, 4, ()))},
            r"`plan.stages\[1\].ranks` must have at least one",
        ),
        ({"stages": (StagePlan(0, 2, (0,)), StagePlan(2, 4, (0,)))}, "each of the ranks 0 to 1 once"),
        ({"stages": (StagePlan(0, 2, (0,)), StagePlan(2, 4, (7,)))}, "each of the ranks 0 to 1 once"),
        ({"stages": (StagePlan(0, 4, (0, 1)),)}, "has 1 stages and a forecast of 2"),
    ],
)
def test_an_edited_plan_is_refused_with_its_key(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        read_plan(pin(tmp_path, msgspec.structs.replace(PINNED.plan, **change)))


def test_a_missing_or_broken_plan_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no plan .*nowhere.json \(`varuna plan --out` writes"):
        read_plan(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match="is a folder"):
        read_plan(tmp_path)
    cut_off = tmp_path / "cut_off.json"
    cut_off.write_text(encode(PINNED)[:200])
    with pytest.raises(ValueError, match=r"cut_off.json is not a valid PinnedPlan: Input data was truncated"):
        read_plan(cut_off)
    cut_off.write_bytes(b"\xff\x00")
    with pytest.raises(ValueError, match=r"cut_off.json is not a valid PinnedPlan"):
        read_plan(cut_off)
