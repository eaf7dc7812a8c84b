"""`python -m tests.zoo [--here] [name ...]`: test every model at every layout and print the results."""

import sys

from tests.zoo.tours import tour, tour_here

if __name__ == "__main__":
    wanted = [argument.lower() for argument in sys.argv[1:] if not argument.startswith("-")]
    (tour_here if "--here" in sys.argv else tour)(wanted)
