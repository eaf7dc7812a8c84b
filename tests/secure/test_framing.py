"""Frames: whole payloads however the bytes arrive, and a limit on their length."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from varuna.secure.framing import FrameReader, FramingError, pack_frame


@given(payloads=st.lists(st.binary(max_size=50), max_size=8), size=st.integers(1, 60))
def test_payloads_arrive_whole_and_in_order_in_pieces_of_any_size(payloads: list[bytes], size: int) -> None:
    stream = b"".join(map(pack_frame, payloads))
    reader = FrameReader()
    found = []
    for place in range(0, len(stream), size):
        found += reader.feed(stream[place : place + size])
    assert found == payloads


def test_a_huge_length_is_refused_before_its_bytes_arrive() -> None:
    """SEC-4"""
    with pytest.raises(FramingError, match="4294967295 bytes, but the limit is 1000"):
        FrameReader(max_bytes=1000).feed(b"\xff\xff\xff\xff")
