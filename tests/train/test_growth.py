"""Memory of a worker does not grow with its steps and saves."""

from pathlib import Path

import pytest

from benchmarks.growth import SHAPES, measure
from tests.pool import Pool

NOISE = 50
"""Objects that come and go; a leak has one per step or save."""


@pytest.mark.parametrize("shape", SHAPES)
def test_objects_and_files_do_not_grow_with_steps_and_saves(shape: str, pool: Pool, tmp_path: Path) -> None:
    """V37: 200 steps and 20 background saves leave neither objects nor open files behind."""
    for marks in pool.run(measure, 2, SHAPES[shape], [200, 400], str(tmp_path)):
        before, after = marks
        assert after["objects"] - before["objects"] < NOISE
        assert after["files"] - before["files"] <= 2
