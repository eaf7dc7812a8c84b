"""Short soaks with the faults that no other test injects."""

from pathlib import Path

import pytest

from tests.morph.soak import soaking

SOAKS = {
    "machines": (
        "lose-machine-within-save",
        "shift-clock",
        "slow-link",
        "fill-scratch-disk",
        "lose-machine-while-morphing",
        "fill-disk",
        "lose-two-machines",
        "lose-all-machines",
    ),
    "files and stores": (
        "flip-checkpoint",
        "cut-journal",
        "kill-store",
        "fill-home-disk",
        "flap",
        "flip-checkpoint",
    ),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SOAKS)
def test_a_job_survives_many_faults_with_the_reference_losses(name: str, tmp_path: Path) -> None:
    """V42, V47, REL-1, REL-2, REL-3, REL-4: `Soak.end` holds the final checks."""
    with soaking(tmp_path, seed=7, stages=1, hosts=3) as soak:
        for fault in SOAKS[name]:
            soak.inject(fault)
        soak.end()
