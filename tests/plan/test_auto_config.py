"""AutoConfig, with the interface of the original, on profiles made by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.plan.profiles import GB, MB, machines, profile, reductions, segment
from varuna import AutoConfig
from varuna.codec import encode
from varuna.errors import PlanError
from varuna.plan.cost.costs import with_network
from varuna.plan.search.search import search
from varuna.types import Duration, Profile, SegmentCost


def folder_with(tmp_path: Path, made: Profile) -> Path:
    (tmp_path / "profile.json").write_text(encode(made))
    return tmp_path


def blocks(count: int, **more: object) -> Profile:
    return profile([segment(1e-3, **more)], [0] * count)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_gpus", [1, 3, 7, 12])
def test_depth_micro_batch_and_seconds_for_any_number_of_gpus(tmp_path: Path, num_gpus: int) -> None:
    """V25: primes included; every depth from 1 to the number of segments is a candidate."""
    folder = folder_with(tmp_path, blocks(4))
    config = AutoConfig(num_gpus, 4, 64, folder, verbose=False)
    depth, microbatch_size, seconds = config.get_min()
    assert list(config.batch_times) == list(range(1, min(4, num_gpus) + 1))
    assert seconds == config.batch_times[depth] == min(config.batch_times.values())
    assert microbatch_size == config.micro_batch[depth]
    best = search(blocks(4), config.cluster, batch_size=64).best
    assert (depth, microbatch_size, seconds) == (
        best.plan.depth,
        best.plan.microbatch_size,
        best.forecast.seconds,
    )


def test_infeasible_depths_are_reported_and_never_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """V25"""
    folder = folder_with(tmp_path, blocks(4, parameter_bytes=GB))
    config = AutoConfig(4, 4, 8, str(folder), gpu_memory_capacity=9 * GB)
    assert config.get_min()[0] > 1 and 1 not in config.batch_times
    printed = capsys.readouterr().err
    assert "4 devices on 1 machine" in printed
    assert "1 stage: stage 0 needs at least 16 GiB, but a device has 9 GiB: 7 GiB too little" in printed
    with pytest.raises(PlanError, match="no layout fits"):
        AutoConfig(2, 4, 8, folder, gpu_memory_capacity=5 * GB, verbose=False)


def test_sizes_that_some_segments_did_not_run_are_left_out_or_estimated_with_a_note(tmp_path: Path) -> None:
    """V25: a missing measurement is an error or an estimate with a note."""
    short = segment(1e-3, sizes=(1, 2))
    uneven = profile([segment(1e-3, sizes=(1, 2, 4), fixed=1e-2), short], [0, 1])
    folder = folder_with(tmp_path, uneven)
    assert max(AutoConfig(1, 1, 64, folder, verbose=False).micro_batch.values()) <= 2
    filled = AutoConfig(1, 1, 64, folder, verbose=False, autofill_missing_compute=True)
    assert filled.get_min()[1] == 4
    assert "micro-batches of 4 are estimated from 2 for some segments" in str(filled)


@pytest.mark.parametrize(
    ("key", "wrong", "fault"),
    [
        ('"seconds_per_element": ', "-1.0", r">= 0\.0 - at `\$\.optimizer\.seconds_per_element`"),
        ('"device_memory_bytes": ', "0", r">= 1 - at `\$\.device_memory_bytes`"),
        ('"step_seconds": ', "1e9", r"<= 86400\.0 - at `\$\.overheads\.step_seconds`"),
        ('"version": ', "2", "version is 2, this library reads 1"),
    ],
)
def test_a_profile_with_invalid_numbers_is_refused_with_their_key(
    tmp_path: Path, key: str, wrong: str, fault: str
) -> None:
    text = encode(blocks(2))
    place = text.index(key) + len(key)
    stop = min(text.index(end, place) for end in (",", "\n", "}"))
    (tmp_path / "profile.json").write_text(text[:place] + wrong + text[stop:])
    with pytest.raises(ValueError, match=fault):
        AutoConfig(2, 2, 8, tmp_path)


def test_a_time_of_zero_and_sizes_out_of_order_are_refused_with_their_key(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(encode(blocks(1)).replace("0.001", "0.0", 1))
    with pytest.raises(ValueError, match=r"> 0\.0 - at `\$\.kinds\[0\]\.sizes\[0\]\.forward\[0\]`"):
        AutoConfig(1, 1, 8, tmp_path)
    with pytest.raises(ValueError, match=r"sizes must be in ascending order .*, not \[2, 1\]"):
        SegmentCost(tuple(reversed(segment(1e-3, sizes=(1, 2)).sizes)), 0, 0, 0)
    with pytest.raises(ValueError, match=r"segments\[1\] is 3, but there are 1 kinds"):
        profile([segment(1e-3)], [0, 3])
    assert Duration(1.0) == Duration(1.0, 0.0)


def test_a_missing_profile_and_zero_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make one with"):
        AutoConfig(1, 1, 8, tmp_path)
    folder = folder_with(tmp_path, blocks(1))
    with pytest.raises(ValueError, match="num_gpus must be 1 or more, not 0"):
        AutoConfig(0, 1, 8, folder)


def test_planning_imports_no_torch(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, blocks(3, activation_bytes=MB))
    code = (
        "import sys; from varuna import AutoConfig; "
        f"AutoConfig(5, 2, 16, {str(folder)!r}, verbose=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert machines(2, 2).num_devices == 4


# ---------------------------------------------------------------- a network that was not measured


def on_one_machine(notes: tuple[str, ...] = ("between: all processes ran on one machine",)) -> Profile:
    """A profile of one machine: nothing is known between machines."""
    return profile(
        [segment(2e-3, parameter_bytes=32 * MB)],
        [0] * 4,
        between=None,
        reduce_costs=reductions(50e9, between=False),
        notes=notes,
    )


def test_a_network_that_was_not_measured_can_be_given(tmp_path: Path) -> None:
    """V25: with the meaning of `varuna plan --network --latency`."""
    folder = folder_with(tmp_path, on_one_machine())
    with pytest.raises(PlanError, match=r'describe the network: network="25Gbit", latency="20us"'):
        AutoConfig(4, 2, 32, folder, verbose=False)
    config = AutoConfig(4, 2, 32, folder, verbose=False, network="10Gbit", latency="50us")
    assumed = with_network(on_one_machine(notes=()), 50e-6, 10e9 / 8)
    best = search(assumed, machines(2, 2), batch_size=32, every_depth=True).best
    assert config.ranking.best.plan == best.plan
    assert config.ranking.best.forecast.seconds == best.forecast.seconds == config.get_min()[2]
    assert "the network between machines is assumed: 10 Gbit/s, 50 µs" in str(config)
    assert "all processes ran on one machine" not in str(config)
    default = AutoConfig(4, 2, 32, folder, verbose=False, network="10Gbit")
    assert "the network between machines is assumed: 10 Gbit/s, 20 µs" in str(default)


def test_a_given_network_replaces_the_measured_one_and_a_slower_one_is_never_faster(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, blocks(4, parameter_bytes=32 * MB))
    fast, slow = (
        AutoConfig(4, 2, 32, folder, verbose=False, network=network).batch_times
        for network in ("400Gbit", "100Mbit")
    )
    assert fast.keys() == slow.keys()
    assert all(fast[depth] <= slow[depth] for depth in fast) and fast != slow


def test_on_one_machine_no_network_is_needed(tmp_path: Path) -> None:
    config = AutoConfig(2, 4, 32, folder_with(tmp_path, on_one_machine()), verbose=False)
    assert "ran on one machine" not in str(config)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"latency": "5us"}, "latency needs network as well: the bandwidth, such as 25Gbit"),
        ({"network": "fast"}, "network 'fast' must be a number above zero with one of the units Gbit"),
        ({"network": "25Gbit", "latency": "5 m"}, "latency '5 m' must be a number above zero"),
    ],
)
def test_a_network_that_cannot_be_read_is_refused_with_its_argument(
    tmp_path: Path, given: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AutoConfig(4, 2, 32, folder_with(tmp_path, blocks(2)), verbose=False, **given)  # type: ignore[arg-type]
