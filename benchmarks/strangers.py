"""Strangers attack every listening socket of a job, from its own machines and from another host.

A stranger has no credential of the job. The figure is the number of attacks that were refused; the printed
matrix has every outcome.
"""

import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.measure import spread
from benchmarks.report import Row
from tests.morph.stranger_attacks import ADMITTED, ATTACKS, HELD, IDLE
from tests.morph.strangers import besieged, draw


def strangers(*, quick: bool) -> list[Row]:
    attacks = ("garbage", "HTTP") if quick else tuple(ATTACKS)
    with tempfile.TemporaryDirectory(prefix="varuna-benchmark-") as folder, besieged(Path(folder)) as siege:
        matrix = siege.attack_all(siege.doors(), attacks)
        intact = siege.job.status()["generation"] == 1 and not siege.strangers.marks()
        siege.job.finish()
    print(draw(matrix))
    made: Counter[tuple[str, str]] = Counter()
    refused: Counter[tuple[str, str]] = Counter()
    for (door, place), outcomes in matrix.items():
        for attack, outcome in outcomes.items():
            made[door.split(" on ")[0], place] += outcome != "-"
            bad = (ADMITTED,) if attack == IDLE else (ADMITTED, HELD)
            refused[door.split(" on ")[0], place] += intact and outcome not in ("-", *bad)
    return [
        Row(
            benchmark="strangers",
            case=f"attacks on sockets of a job: {owner}, {place}",
            against="attacks that were refused",
            unit="attacks",
            ours=spread([made[owner, place]]),
            other=spread([refused[owner, place]]),
            ratio=spread([made[owner, place] / max(refused[owner, place], 1)]),
            target=1.0,
        )
        for owner, place in sorted(made)
    ]
