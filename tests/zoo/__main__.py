"""`python -m tests.zoo`: test every model and print the results.

python -m tests.zoo [name ...]                    every layout of up to 8 ranks on the CPU
python -m tests.zoo --here [name ...]             all stages in one process
python -m tests.zoo --device cuda --jobs 8        precisions, placements and depths on a device
"""

import argparse
import sys

from tests.zoo.devices import Tour, tour_device
from tests.zoo.tours import tour, tour_here


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description="Test the models of the zoo.")
    parser.add_argument("names", nargs="*", help="parts of the names of models; all without it")
    parser.add_argument("--here", action="store_true", help="run all stages in one process")
    parser.add_argument("--device", help="cuda or cpu: test precisions and placements on this device")
    parser.add_argument("--precisions", default="fp32,bf16", help="fp32, bf16, fp16, comma-separated")
    parser.add_argument("--depths", default="1,2", help="numbers of stages, comma-separated")
    parser.add_argument("--only", default="", help="parts of names, comma-separated")
    parser.add_argument("--skip", type=int, default=0, help="number of models to leave out at the beginning")
    parser.add_argument("--limit", type=int, help="number of models")
    parser.add_argument("--jobs", type=int, default=1, help="models at the same time, two processes each")
    parser.add_argument("--seconds", type=float, default=450.0, help="start no model after this time")
    options = parser.parse_args()
    wanted = [name.lower() for name in (*options.names, *filter(None, options.only.split(",")))]
    if options.device is None:
        (tour_here if options.here else tour)(wanted)
        return 0
    device = f"{options.device}:0" if options.device == "cuda" else options.device
    depths = tuple(map(int, options.depths.split(",")))
    where = Tour(device, tuple(options.precisions.split(",")), depths)
    amount = {"skip": options.skip, "limit": options.limit, "jobs": options.jobs}
    fine = tour_device(where, wanted, **amount, seconds=options.seconds)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
