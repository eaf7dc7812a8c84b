"""Every refusal of a model has a row that provokes it and follows its advice."""

from tests.capture import test_ways_out as of_captures
from tests.train import test_ways_out as of_wrappers
from tests.ways_out import sites

ELSEWHERE = {"varuna/capture/model/adapters.py refuse_changing_adapters": "tests/hf/test_lora.py, with peft"}


def test_every_refusal_has_a_row() -> None:
    """EXA-9: by the source code of the library, also for refusals that are yet to be written."""
    rows = {way.site for way in of_captures.WAYS.values()}
    rows |= {way.site for _, way in of_wrappers.WAYS.values()}
    exempt = {**of_captures.INTERNAL, **of_wrappers.INTERNAL, **ELSEWHERE}
    assert sorted(sites().keys() - rows - exempt.keys()) == []
    assert sorted((rows | exempt.keys()) - sites().keys()) == []  # rows of refusals that are gone
