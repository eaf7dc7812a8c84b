"""Time of one search in a process of its own: `python -m benchmarks.planning_search DEVICES`.

Imports and compilation count and are printed separately. No torch is imported.
"""

import subprocess
import sys
import time

import msgspec

from tests.plan.profiles import machines, transformer
from varuna.plan.cost import kernel
from varuna.plan.cost.simulate import LinkTimes, PipelineTimes, StageTimes, name_orders, simulate
from varuna.plan.search.search import search
from varuna.types import ScheduleName

LAYERS, BATCH_SIZE, DEVICES_PER_MACHINE = 96, 8192, 8


class Answer(msgspec.Struct, frozen=True):
    """The seconds of one search in a new process."""

    first: float  # with all that had to be loaded
    again: float  # the same question, asked once more
    num_simulated: int


def in_a_new_process(devices: int) -> Answer:
    """Numba's compiled code comes from its cache on disk, if this is not the first time."""
    command = [sys.executable, "-m", __spec__.name, str(devices)]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return msgspec.json.decode(made.stdout, type=Answer)


def main() -> None:
    profile = transformer(LAYERS)
    cluster = machines(int(sys.argv[1]) // DEVICES_PER_MACHINE, DEVICES_PER_MACHINE)
    taken = []
    for _ in range(2):
        started = time.perf_counter()
        found = search(profile, cluster, batch_size=BATCH_SIZE)
        taken.append(time.perf_counter() - started)
    sys.stdout.buffer.write(msgspec.json.encode(Answer(*taken, found.num_simulated)))


def equal_stages(schedule: ScheduleName, depth: int, microbatches: int) -> tuple[float, float]:
    """(bubble, seconds that simulating took) of stages whose messages take no time."""
    one = (1.0, 1.0, 2.0, 1.0, 1.0)
    orders = name_orders(schedule, stages=depth, microbatches=microbatches)
    ways = (LinkTimes(0.0, 0.0),) * (depth - 1)
    kernel.compiled_play()
    started = time.perf_counter()
    found = simulate(orders, [PipelineTimes((StageTimes(one, one),) * depth, ways, ways)])
    seconds = found.seconds
    return 1.0 - 3.0 * microbatches / seconds, time.perf_counter() - started


if __name__ == "__main__":
    main()
