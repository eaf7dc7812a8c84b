"""Every refusal of a model has a row that provokes it and follows its advice."""

from tests.capture import test_ways_out as of_captures
from tests.train import test_ways_out as of_wrappers
from tests.ways_out import ROOT, sites

WITH_PACKAGES = {
    "varuna/capture/model/adapters.py": "tests/hf/test_lora.py",
    "varuna/capture/model/quantized.py": "tests/hf/test_quantized.py",
}
"""Refusals of models that other packages make, and the tests that make such models."""


def test_every_refusal_has_a_row() -> None:
    """EXA-9: by the source code of the library, also for refusals that are yet to be written."""
    rows = {way.site for way in of_captures.WAYS.values()}
    rows |= {way.site for _, way in of_wrappers.WAYS.values()}
    exempt = of_captures.INTERNAL.keys() | of_wrappers.INTERNAL.keys()
    known = {site for site in sites() if site.split()[0] not in WITH_PACKAGES}
    assert sorted(known - rows - exempt) == []
    assert sorted((rows | exempt) - known) == []  # rows of refusals that are gone
    for tests in WITH_PACKAGES.values():
        assert "CaptureError" in (ROOT / tests).read_text()
