"""`python -m tests.zoo [--here] [name ...]`: every model at every layout, and what became of it."""

import sys

from tests.zoo.tours import tour, tour_here

if __name__ == "__main__":
    wanted = [argument.lower() for argument in sys.argv[1:] if not argument.startswith("-")]
    (tour_here if "--here" in sys.argv else tour)(wanted)
