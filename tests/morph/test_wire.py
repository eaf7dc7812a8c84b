"""The wire rejects unknown, replayed, changed and too long messages."""

from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from varuna.morph.protocol.wire import GREETING_BYTES, MAGIC, MAX_BYTES, MAX_FIRST_BYTES, Wire, WireError

SECRET = b"s" * 32


def connected(secret: bytes = SECRET) -> tuple[Wire, Wire]:
    caller, listener = Wire(secret, is_caller=True), Wire(SECRET, is_caller=False)
    assert caller.feed(listener.greeting) == listener.feed(caller.greeting) == []
    return caller, listener


@settings(deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 50), max_size=30))
def test_messages_arrive_complete_and_in_order_in_chunks_of_any_size(
    payloads: list[bytes], cuts: list[int]
) -> None:
    caller, listener = connected()
    stream = b"".join(caller.pack(payload) for payload in payloads)
    found: list[bytes] = []
    for cut in cuts:
        found += listener.feed(stream[:cut])
        stream = stream[cut:]
    assert found + listener.feed(stream) == payloads
    assert [*caller.feed(listener.pack(b"and back"))] == [b"and back"]


@settings(deadline=None)
@given(st.binary(max_size=500))
def test_unknown_bytes_are_never_read_as_a_message(noise: bytes) -> None:
    """V46"""
    for listener in (Wire(SECRET, is_caller=False), connected()[1]):
        try:
            assert listener.feed(noise) == []
        except WireError:
            assert not listener.trusted


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=60), st.data())
def test_one_flipped_bit_is_found(payload: bytes, data: st.DataObject) -> None:
    caller, listener = connected()
    frame = bytearray(caller.pack(payload))
    place = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[place // 8] ^= 1 << place % 8
    with suppress(WireError):
        assert listener.feed(bytes(frame)) == []


def test_another_secret_is_refused() -> None:
    """V46"""
    caller, listener = connected(b"t" * 32)
    with pytest.raises(WireError, match="wrong signature"):
        listener.feed(caller.pack(b"let me in"))


def test_a_message_sent_twice_is_refused_on_this_connection_and_on_another() -> None:
    """V46: replay"""
    caller, listener = connected()
    frame = caller.pack(b"kill all")
    assert listener.feed(frame) == [b"kill all"]
    with pytest.raises(WireError):
        listener.feed(frame)
    recorded = caller.greeting + frame
    with pytest.raises(WireError):
        Wire(SECRET, is_caller=False).feed(recorded)


def test_a_reflected_message_is_refused() -> None:
    """V46: reflection"""
    listener = Wire(SECRET, is_caller=False)
    listener.feed(listener.greeting)  # the caller shows the listener's own nonce
    with pytest.raises(WireError):
        listener.feed(listener.pack(b"welcome"))


def test_the_size_of_messages_is_limited_before_and_after_the_first() -> None:
    """V46: bounded"""
    _, listener = connected()
    with pytest.raises(WireError, match="bytes, but the limit is"):
        listener.feed((MAX_FIRST_BYTES + 1).to_bytes(4, "big"))
    caller, listener = connected()
    listener.feed(caller.pack(b"a friend"))
    assert listener.feed(caller.pack(bytes(MAX_BYTES))) == [bytes(MAX_BYTES)]
    with pytest.raises(ValueError, match="but the limit is"):
        caller.pack(bytes(MAX_BYTES + 1))


def test_another_version_is_detected_by_its_first_bytes() -> None:
    listener = Wire(SECRET, is_caller=False)
    with pytest.raises(WireError, match="another program or varuna version"):
        listener.feed(MAGIC.replace(b"2", b"3") + bytes(GREETING_BYTES))
