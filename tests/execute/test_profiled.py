"""Names of the library's activities in torch.profiler."""

from typing import Any, cast

import pytest
import torch

from varuna.execute.device.profiled import profiled, profiled_as
from varuna.train.hot.morph import morph


@profiled_as("double")
def double(number: int) -> int:
    return 2 * number


def test_activities_are_named_only_while_a_profiler_runs() -> None:
    """SEE-4"""
    assert profiled("send") is profiled("forward", 3) and double(2) == 4
    with torch.profiler.profile() as found:
        with profiled("send"), profiled("forward", 3):
            assert double(3) == 6
        with pytest.raises(AttributeError):
            morph(cast(Any, None), cast(Any, None))
    names = {event.key for event in found.key_averages()}
    assert {"varuna send", "varuna forward 3", "varuna double", "varuna morph"} <= names
