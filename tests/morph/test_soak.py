"""A short soak with the faults that no other test injects."""

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
def test_a_job_survives_many_faults_with_the_reference_losses(tmp_path: Path) -> None:
    """V42, V47: `Soak.end` holds the final checks."""
    with soaking(tmp_path, seed=7, stages=1, hosts=3) as soak:
        for fault in FAULTS:
            soak.do(fault)
        soak.end()
