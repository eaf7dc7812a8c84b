"""Layouts as users write them, and the set that verify chooses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.types import parse_stage_map
from varuna.verification.layouts import (
    SCHEDULES,
    VerifyLayout,
    chosen_layouts,
    parse_layout,
    parse_layouts,
)

LAYOUTS = st.builds(
    VerifyLayout,
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    schedule=st.sampled_from(SCHEDULES),
    recompute=st.booleans(),
    shard=st.booleans(),
    chunk=st.none() | st.integers(1, 9),
)


@given(LAYOUTS, st.integers(1, 20))
def test_a_layout_is_read_as_it_is_written(layout: VerifyLayout, batch_size: int) -> None:
    """B1, PRO-1"""
    assert parse_layout(str(layout)) == layout
    stages = parse_stage_map(layout.map_text)
    assert [len(ranks) for ranks in stages] == list(layout.widths)
    assert sorted(rank for ranks in stages for rank in ranks) == list(range(layout.world))
    assert 1 <= layout.microbatch_size(batch_size) <= batch_size


@pytest.mark.parametrize("text", ["0x1", "2x0", "2", "x", "2x1:chunk=0", "2+0", "2x1:chunk", "2x1 1x2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"layout|option"):
        parse_layouts(text)


def test_the_chosen_set_has_every_kind_of_layout() -> None:
    """B1, PRO-1: deepest, widest, odd, unequal, recompute, sharded optimizer, each schedule."""
    chosen = chosen_layouts(num_segments=9, batch_size=8, by_microbatch=False, face="varuna")
    assert {layout.schedule for layout in chosen} == set(SCHEDULES)
    assert {(4, 1), (1, 4)} <= {(len(one.widths), one.widths[0]) for one in chosen}
    assert any(one.is_uneven for one in chosen) and any(3 in one.widths for one in chosen)
    assert any(one.recompute for one in chosen) and any(one.shard for one in chosen)
    alone = chosen_layouts(num_segments=1, batch_size=1, by_microbatch=True, face="pyrannc")
    assert {one.widths for one in alone} == {(1,)}
