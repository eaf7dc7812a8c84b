"""Short soaks with the faults that no other test injects."""

from pathlib import Path

import pytest

from tests.morph.soak import soaking

SOAKS = {
    "machines": (
        "machine_is_lost_within_a_save",
        "clock_jumps",
        "link_is_slow",
        "scratch_disk_is_full",
        "machine_is_lost_while_morphing",
        "log_disk_is_full",
        "two_machines_are_lost",
        "all_machines_are_lost",
    ),
    "files and stores": (
        "newest_checkpoint_is_flipped",
        "journal_is_cut",
        "store_is_killed",
        "home_disk_is_full",
        "list_flaps",
        "newest_checkpoint_is_flipped",
    ),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SOAKS)
def test_a_job_survives_many_faults_with_the_reference_losses(name: str, tmp_path: Path) -> None:
    """V42, V47, REL-1, REL-2, REL-3, REL-4: `Soak.end` holds the final checks."""
    with soaking(tmp_path, seed=7, stages=1, hosts=3) as soak:
        for fault in SOAKS[name]:
            soak.do(fault)
        soak.end()
