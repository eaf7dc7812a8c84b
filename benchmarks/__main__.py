"""The benchmarks' door: `python -m benchmarks [NAME...] [--quick]`."""

import argparse
import logging
import os
from pathlib import Path

# Before torch is imported, here and in the workers: one thread per worker.
os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console

from benchmarks.cases import BENCHMARKS, Lab
from benchmarks.measure import FULL, QUICK
from benchmarks.report import Row, load, markdown, save, table
from tests.pool import Pool

HOME = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)} (default: all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="see that all of it runs; the numbers mean nothing"
    )
    parser.add_argument(
        "--into", type=Path, help="folder for the results (default: benchmarks/, with --quick none)"
    )
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(BENCHMARKS)):
        parser.error(f"no benchmark is called {', '.join(unknown)} (there are {', '.join(BENCHMARKS)})")
    logging.getLogger("torch").setLevel(logging.ERROR)
    console = Console()
    pool = Pool()
    lab = Lab(pool, QUICK if arguments.quick else FULL, arguments.quick)
    into = arguments.into or (None if arguments.quick else HOME)
    rows: list[Row] = []
    try:
        for name, benchmark in BENCHMARKS.items():
            if arguments.names and name not in arguments.names:
                continue
            with console.status(f"{name} ..."):
                found = benchmark(lab)
            rows += found
            if into is not None:
                save(name, found, into / "results")
                (into / "results.md").write_text(markdown(list(load(into / "results", list(BENCHMARKS)))))
    finally:
        pool.close()
        console.print(table(rows))


if __name__ == "__main__":
    main()
