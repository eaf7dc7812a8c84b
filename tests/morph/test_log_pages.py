"""Logs and messages of any size travel in bounded pieces."""

import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from varuna.morph.protocol import stream
from varuna.morph.protocol.stream import MessageReader, pack_message
from varuna.morph.run import log_pages, supervisor
from varuna.morph.run.log_pages import find_lines, last_lines, read_page
from varuna.secure.framing import FramingError, pack_frame


@given(
    text=st.lists(st.sampled_from([b"\n", b"a", b"\xc3\xa9"]), max_size=60).map(b"".join),
    lines=st.integers(1, 8),
    scan=st.integers(1, 9),
    block=st.integers(1, 9),
)
def test_the_last_lines_are_found_in_steps_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, lines: int, scan: int, block: int
) -> None:
    """REL-5"""
    path = tmp_path_factory.getbasetemp() / "log"
    path.write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_pages, "_BLOCK_BYTES", block)
        page = find_lines(path, lines, scan_bytes=scan)
        assert page.stop == len(text)
        while page.lines:
            page = find_lines(path, page.lines, stop=page.start, scan_bytes=scan)
    assert text[page.start :] == b"".join(text.splitlines(keepends=True)[-lines:])


def test_the_end_of_a_huge_log_is_found_without_reading_all_of_it(tmp_path: Path) -> None:
    """REL-5: 64 GiB, most of it a hole."""
    path = tmp_path / "log"
    path.write_bytes(b"")
    os.truncate(path, 2**36)
    with path.open("ab") as log:
        log.write(b"".join(b"\nline %d" % number for number in range(100)))
    assert last_lines(path, 2) == "line 98\nline 99"
    page = find_lines(path, 10**6)
    assert page.lines and page.start == page.stop - log_pages.SCAN_BYTES
    assert len(read_page(path, 0, page.stop).data) == log_pages.PAGE_BYTES
    assert last_lines(tmp_path / "missing") == ""


@given(sizes=st.lists(st.integers(0, 40), max_size=6), chunk=st.integers(1, 50))
def test_messages_arrive_whole_and_in_order(sizes: list[int], chunk: int) -> None:
    """REL-5: also those that are longer than a frame."""
    messages = [os.urandom(size) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "PIECE_BYTES", 7)
        data = b"".join(map(pack_message, messages))
        reader, found = MessageReader(), list[bytes]()
        for place in range(0, len(data), chunk):
            found += reader.feed(data[place : place + chunk])
    assert found == messages


def test_frames_of_another_program_and_endless_messages_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-4"""
    for strange in (pack_frame(b""), pack_frame(b"{}")):
        with pytest.raises(FramingError, match="another program"):
            MessageReader().feed(strange)
    with pytest.raises(FramingError, match="but the limit is 1048577"):
        MessageReader().feed(b"\x00\x10\x00\x02")
    monkeypatch.setattr(stream, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(FramingError, match="more than 100 bytes"):
        MessageReader().feed(pack_frame(b"+" + bytes(60)) * 2)


def test_output_for_the_terminal_is_bounded_and_never_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REL-5: a line without an end does not hold back what follows, and a flood is cut."""
    monkeypatch.setattr(supervisor, "MAX_OUTPUT", 10)
    monkeypatch.setattr(supervisor, "MAX_BACKLOG", 100)
    worker = supervisor.WorkerProcess(0, tmp_path, key="1/0", shows_progress=False)
    worker.out.write_bytes(b"x" * 25 + b"\nend\n")
    shown = [text for _ in range(4) for _, text in worker.new_output()]
    assert "".join(shown) == "x" * 25 + "\nend\n"
    with worker.out.open("ab") as log:
        log.write(b"y" * 1000)
    worker.end(0)
    shown = [text for _, text in worker.new_output()]
    assert shown[0].startswith("[900 bytes are not shown here: see ") and "".join(shown[1:]) == "y" * 100
