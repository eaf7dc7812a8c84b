"""A killed profiler continues where it stopped."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.profile.ladders import BRIEF, MESSAGES, Ladder, get_batch
from varuna.plan.profile_file import NAME, UNFINISHED, read_profile
from varuna.profile.profiler import Profiler
from varuna.types import LinkCost

ROOT = Path(__file__).parents[2]
SIZES = [1, 2, 3, 4]
ITEMS = 2 + len(SIZES)  # links and optimizer


def profile(folder: Path) -> None:
    Profiler(
        Ladder(4), get_batch, device="cpu", out_folder=folder, effort=BRIEF, message_bytes=MESSAGES
    ).profile_all(SIZES)


SCRIPT = """
import sys
from pathlib import Path
from tests.profile.test_resume import profile

profile(Path(sys.argv[1]))
"""


def run_and_kill(folder: Path, after: int) -> list[str]:
    """Kills the profiler when it says that so many items are done; what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said += [line] if line.startswith("varuna: profiled") else []
        if len(said) == after:
            process.send_signal(signal.SIGKILL)
            break
    process.communicate()
    return said


def test_a_killed_profiler_loses_at_most_one_item(tmp_path: Path) -> None:
    """V24: killed twice at seeded moments, then resumed; what was written stays to the bit."""
    chance = random.Random(24)
    early, late = chance.randint(1, 2), chance.randint(4, ITEMS - 1)
    run_and_kill(tmp_path, early)
    assert not (tmp_path / NAME).exists()
    before = msgspec.json.decode((tmp_path / UNFINISHED).read_bytes())
    said = run_and_kill(tmp_path, late - early)
    assert not any("links" in line for line in said), "links were measured twice"
    kept = read_profile(tmp_path)
    assert kept.within == msgspec.convert(before["within"], LinkCost)
    assert len(kept.kinds[0].sizes) >= late - 2
    profile(tmp_path)
    after = read_profile(tmp_path)
    assert [size.microbatch_size for size in after.kinds[0].sizes] == SIZES
    for old, new in zip(kept.kinds, after.kinds, strict=True):
        assert new.sizes[: len(old.sizes)] == old.sizes
    assert not (tmp_path / UNFINISHED).exists()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
