"""A short soak: the kinds of faults that no other test of morphing does, in one job."""

from pathlib import Path

import pytest

from tests.morph.soak import soaking

FAULTS = (
    "machine_is_lost_within_a_save",
    "clock_jumps",
    "link_is_slow",
    "scratch_disk_is_full",
    "machine_is_lost_while_morphing",
    "log_disk_is_full",
    "two_machines_are_lost",
    "all_machines_are_lost",
)


@pytest.mark.timeout(400)
def test_a_job_outlives_one_fault_after_the_other_and_its_losses_are_those_of_peace(tmp_path: Path) -> None:
    """V42, V47: what holds at the end is in `Soak.end`."""
    with soaking(tmp_path, seed=7, stages=1, hosts=3) as soak:
        for fault in FAULTS:
            soak.do(fault)
        soak.end()
