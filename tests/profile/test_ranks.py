"""Several processes profile together: all return the profile, one writes it, and errors reach all."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.pool import Pool
from tests.profile.ladders import BRIEF, MESSAGES, Ladder, get_batch
from varuna.measure.reductions import group_sizes
from varuna.plan.profile_file import read_profile
from varuna.profile.profiler import Profiler
from varuna.profile.ranks import RankPlace, RankPlaces
from varuna.types import Profile


def profiled(folder: Path, sizes: list[int]) -> Profile:
    return Profiler(
        Ladder(4),
        get_batch,
        device="cpu",
        out_folder=folder / str(dist.get_rank()),
        effort=BRIEF,
        message_bytes=MESSAGES,
    ).profile_all(sizes)


def test_two_processes_get_one_profile_and_the_first_writes_it(pool: Pool, tmp_path: Path) -> None:
    """V24: any number of devices; the all-reduce is timed over the ranks themselves."""
    first, second = pool.run(profiled, 2, tmp_path, [1, 2])
    assert first == second == read_profile(tmp_path / "0")
    assert not (tmp_path / "1").exists()
    assert {(cost.group_size, cost.between_machines) for cost in first.reductions} == {(2, False)}
    assert {cost.num_bytes for cost in first.reductions} == {64, *MESSAGES}
    assert all(cost.sharing is not None and cost.sharing.seconds > 0 for cost in first.reductions)
    (extended, _) = pool.run(profiled, 2, tmp_path, [4])
    assert [size.microbatch_size for size in extended.kinds[1].sizes] == [1, 2, 4]
    assert extended.kinds[1].sizes[:2] == first.kinds[1].sizes


def failing(folder: Path, how: str) -> str:
    rank = dist.get_rank()

    def batch(size: int) -> dict[str, Tensor]:
        if rank == 1 and (how == "at once" or (how == "later" and size == 3)):
            raise RuntimeError("the data are gone")
        return get_batch(size)

    model = Ladder(5 if how == "another model" and rank == 1 else 4)
    profiler = Profiler(model, batch, device="cpu", out_folder=folder, effort=BRIEF, message_bytes=MESSAGES)
    try:
        profiler.profile_all([3])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


@pytest.mark.parametrize("how", ["at once", "later"])
def test_an_error_of_one_rank_is_an_error_of_all(pool: Pool, tmp_path: Path, how: str) -> None:
    told = pool.run(failing, 2, tmp_path, how)
    assert told == [
        "WorkerError: rank 1 failed while profiling: RuntimeError: the data are gone",
        "RuntimeError: the data are gone",
    ]


def test_ranks_with_different_models_are_refused(pool: Pool, tmp_path: Path) -> None:
    told = pool.run(failing, 2, tmp_path, "another model")
    assert all(text.startswith("ValueError: ranks [1] profile another model than rank 0") for text in told)


def places(*of: tuple[str, str], cores: int = 8) -> RankPlaces:
    return RankPlaces([RankPlace(machine, device, cores) for machine, device in of])


def test_ranks_that_share_a_device_or_cores_do_not_measure_at_once() -> None:
    gpus = places(("a", "cuda:0"), ("a", "cuda:1"), ("a", "cuda:1"), ("b", "cuda:0"))
    assert gpus.workers() == [0, 1, 3]
    assert gpus.share_a_device((1, 2)) and not gpus.share_a_device((0, 1, 3))
    assert places(*[("a", "cpu")] * 4, cores=2).workers() == [0, 1]
    assert places(*[("a", "cpu")] * 4, cores=0).workers() == [0]
    assert not places(*[("a", "cpu")] * 4).share_a_device((0, 1))


def test_reduce_groups_lie_within_a_machine_or_take_one_rank_of_each() -> None:
    spread = places(*[(machine, "cpu") for machine in "abc" for _ in range(4)])
    assert spread.groups() == [
        ((0, 1), False),
        ((0, 1, 2, 3), False),
        ((0, 4), True),
        ((0, 4, 8), True),
    ]
    assert spread.far_pair == (0, 4) and spread.num_on_machine(5) == 4
    assert places(("a", "cpu")).groups() == [] and places(("a", "cpu")).far_pair is None
    assert [group_sizes(most) for most in (1, 2, 3, 8, 9)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 9]]
