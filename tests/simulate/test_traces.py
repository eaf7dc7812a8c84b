"""Traces of machines: three formats are read, other files are refused with a line (B5, PRO-3)."""

import json
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from varuna.simulate.traces import MachineChange, parse_trace, read_trace


def parse(text: str | bytes) -> object:
    return parse_trace(text.encode() if isinstance(text, str) else text, source="market")


def changes(text: str) -> list[tuple[float, tuple[str, ...], tuple[str, ...]]]:
    return [(one.at, one.removed, one.added) for one in parse_trace(text.encode(), source="market").changes]


def test_the_events_of_bamboo_are_read() -> None:
    """B5, PRO-3"""
    text = "0,add,node1\n0,add,node2\n60000,remove,node1\n120000,add,node3\n"
    trace = parse_trace(text.encode(), source="market")
    assert changes(text) == [(0, (), ("node1", "node2")), (60, ("node1",), ()), (120, (), ("node3",))]
    assert (trace.end, trace.most_machines, trace.machine_seconds) == (120, 2, 180)
    assert trace.mean_machines == 1.5


def test_the_availability_of_skypilot_is_read_and_machines_come_back_as_new_ones() -> None:
    """B5, PRO-3"""
    trace = parse_trace(
        json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 2, 2, 1, 3, 0]}).encode(), source="market"
    )
    assert trace.end == 1800 and trace.machine_seconds == 300 * 8
    assert trace.changes == (
        MachineChange(300, added=("vm0", "vm1")),
        MachineChange(900, removed=("vm1",)),
        MachineChange(1200, added=("vm2", "vm3")),
        MachineChange(1500, removed=("vm0", "vm2", "vm3")),
    )


def test_our_own_format_has_notices_comments_and_an_end() -> None:
    """B5, PRO-3"""
    text = "# a market\r\nSeconds, Event, Machine\r\n0.5,add,a\n\n"
    text += "10,notice,a # two minutes\n130,remove,a\n200,end,\n"
    trace = parse_trace(b"\xef\xbb\xbf" + text.encode(), source="market")
    assert trace.end == 200
    assert trace.changes == (
        MachineChange(0.5, added=("a",)),
        MachineChange(10, noticed=("a",)),
        MachineChange(130, removed=("a",)),
    )


@pytest.mark.parametrize(
    "text",
    [
        '"0","add","node#1"\r\n"0","add","node#2"\r\n"60000","remove","node#1"\r\n',  # as csv.QUOTE_ALL
        '0, "add", "node#1"\n0,add,node#2\n60000,remove,node#1',
        '# "quoted"\n\n0,ADD,node#1 # a comment\n  # another\n0,add,node#2\n6e4,Remove,node#1\n',
        '"seconds","event","machine"\n"0","add","node#1"\n"0","add","node#2"\n"60","remove","node#1"\n',
        "machine,event,seconds\nnode#1,add,0\nnode#2,add,0\nnode#1,remove,60.0\n",
        "event,machine,seconds\nadd,node#1,0\nadd,node#2,0\nremove,node#1,60\nend,,60\n",
        "seconds,event,machine\n0,add,node#1\n0,add,node#2\n60,remove,node#1\n60,end\n",
    ],
)
def test_cells_may_be_quoted_and_columns_of_our_own_format_may_be_in_any_order(text: str) -> None:
    """B5, PRO-3: a # in a name starts no comment."""
    trace = parse_trace(text.encode(), source="market")
    assert changes(text) == [(0, (), ("node#1", "node#2")), (60, ("node#1",), ())]
    assert (trace.end, trace.notes) == (60, ())


def test_other_columns_of_our_own_format_are_not_used() -> None:
    """B5, PRO-3"""
    text = "zone,seconds,event,machine\nus,0,add,a\nus,60,remove,a\n"
    trace = parse_trace(text.encode(), source="market")
    assert changes(text) == [(0, (), ("a",)), (60, ("a",), ())]
    assert trace.notes == ("column 'zone' is not used",)


def test_a_first_event_after_most_of_the_trace_is_noted_with_the_unit_of_times() -> None:
    """B5, PRO-3: seconds since 1970 in the format that has milliseconds."""
    trace = parse_trace(b"1760000000,add,a\n1760003600,remove,a\n", source="market")
    assert trace.notes == ("the first event is at 1,760,000 s of 1,760,004 s (times are in milliseconds)",)


@pytest.mark.parametrize("first", [1_760_000_000, 1_760_000_000.5])
def test_absolute_times_begin_at_0(first: float) -> None:
    """B5, PRO-3: times since 1970, in seconds of our own format, and in milliseconds of Bamboo's."""
    ours = [(0, "add,a"), (0.5, "add,b"), (10, "notice,a"), (130, "remove,a"), (200, "end,")]
    bamboo = [(0, "add,a"), (90_001, "remove,a"), (3_600_000, "add,b")]
    for head, rows, offset in (("seconds,event,machine\n", ours, first), ("", bamboo, round(first * 1000))):
        plain, moved = (
            parse_trace(
                (head + "".join(f"{at + by!r},{row}\n" for at, row in rows)).encode(), source="market"
            )
            for by in (0, offset)
        )
        assert (moved.changes, moved.end) == (plain.changes, plain.end)
        assert plain.notes == ()
        assert moved.notes == ("times are absolute; they were moved so that the first event is at 0",)


def test_a_notice_announces_the_next_removal_of_its_machine() -> None:
    """B5, PRO-3: one without a later removal is ignored, with a note."""
    text = "seconds,event,machine\n0,add,a\n0,add,b\n5,notice,a\n6,notice,b\n10,remove,a\n"
    text += "20,add,a\n25,notice,a\n30,remove,a\n30,add,a\n30,notice,a\n99,end,\n"
    trace = parse_trace(text.encode(), source="market")
    assert trace.announced() == [(5.0, "a", 10.0), (25.0, "a", 30.0)]
    assert trace.notes == (
        "line 5: notice of b, which is not removed later; ignored",
        "line 11: notice of a, which is not removed later; ignored",
    )


def test_odd_events_are_ignored_with_a_note_and_times_are_sorted() -> None:
    """B5, PRO-3"""
    text = "5000,remove,x\n1000,add,a\n2000,add,a\n3000,remove,a\n3000,add,a\n4000,add,b\n4000,remove,b\n"
    trace = parse_trace(text.encode(), source="market")
    assert changes(text) == [(1, (), ("a",)), (3, ("a",), ("a",))]
    assert "not in order" in trace.notes[0]
    assert "line 3: a is added, but is there already; ignored" in trace.notes
    assert "line 1: remove of x, which is not there; ignored" in trace.notes


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: the file has no event"),
        ("# only a comment\n", "line 1: the file has no event"),
        ("0,add,a\nhello\n", "line 2: 'hello' has 1 columns"),
        ("0,add,a\n5,explode,a\n", "line 2: unknown event 'explode'"),
        ("0,add,a\nsoon,remove,a\n", "line 2: 'soon' is not a time"),
        ("-1,add,a\n", "line 1: the time -1 is not 0 or more"),
        ("nan,add,a\n", "line 1: the time nan is not 0 or more"),
        ("inf,add,a\n", "line 1: the time inf is too large"),
        ("1e13,add,a\n", r"line 1: the time 1e13 is too large \(times are in milliseconds, below 1e\+13"),
        ("seconds,event,machine\n1760000000000,add,a\n", r"too large \(times are in seconds, below 1e\+10"),
        ("0,add,\n", "line 1: the machine has no name"),
        ("seconds,event,seconds\n0,add,a\n", "line 1: 'seconds' is not a time"),
        ('0,add,a\n5,add,"b\n9,remove,a\n', "line 2: .* is not a line of a CSV file: unexpected end"),
        ('0,add,"a"b\n', "line 1: .* is not a line of a CSV file"),
        ("seconds,event,machine,zone\n0,add,a\n", "line 2: '0,add,a' has 3 columns"),
        (
            "seconds,event,machine\n5,add,a\n3,end,\n",
            "line 3: the trace ends at 3 s, but line 2 has an event at 5 s",
        ),
        (b"0,add,a\n\xff\xfe,add,b\n", "line 2: not UTF-8"),
        ('{"metadata": {"gap_seconds": 300},\n "data": [1,,2]}', "line 2: invalid JSON"),
        ("[1, 2, 3]", "gap_seconds must be a number above 0"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds must be a number above 0"),
        ('{"metadata": {"gap_seconds": 300}, "data": []}', "data must be a list"),
        ('{"metadata": {"gap_seconds": 300},\n"data": [1,\n2,\n-3]}', r"line 4: data\[2\] is -3"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1.5]}', r"line 1: data\[0\] is 1.5"),
        ('{"metadata": {"gap_seconds": 300}, "data": [true]}', r"data\[0\] is true"),
        ('{"metadata": {"gap_seconds": 300}, "data": ["x"]}', r"data\[0\] is \"x\""),
        ("import torch\n", "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(text: str | bytes, why: str) -> None:
    """B5, PRO-3"""
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.csv", tmp_path):
        with pytest.raises(ValueError, match="cannot read the trace"):
            read_trace(path)


CELLS = st.one_of(
    st.sampled_from(
        ["0", "60000", "-1", "1e9", "nan", "inf", "1e400", "add", "remove", "notice", "end", "node1"]
    ),
    st.sampled_from(
        ["seconds", "event", "machine", "", " ", "price", "#", '"', '"a"', "\x00", "add,add", "9" * 5000]
    ),
    st.text(max_size=8),
)
ROWS = st.tuples(st.sampled_from(["0", "5", "60000"]), st.sampled_from(["add", "remove"]), st.just("a"))
TABLES = st.lists(ROWS.map(list) | st.lists(CELLS, max_size=4), max_size=6).map(
    lambda rows: [",".join(row) for row in rows]
)
CSV = st.tuples(
    st.sampled_from(["", "\ufeff"]),
    st.sampled_from(
        [
            "",
            "seconds,event,machine",
            "machine,price,event,seconds",
            '"seconds","event","machine"',
            "time,event,machine",
        ]
    ),
    TABLES,
    st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
).map(lambda found: (found[0] + found[3].join([found[1], *found[2]])).encode("utf-8", "surrogatepass"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
JSON = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.fixed_dictionaries({}, optional={"gap_seconds": st.just(300) | VALUES}) | VALUES,
        "data": st.lists(st.integers(0, 20) | VALUES, max_size=5) | VALUES,
    },
).map(lambda found: json.dumps(found, indent=1).encode())


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), CSV, JSON))
@example(b"")
@example(b"\xef\xbb\xbf")
@example(b"{" + b"[" * 100_000)
@example(b'{"metadata": {"gap_seconds": ' + b"9" * 5000 + b'}, "data": [1]}')
@example(b"seconds,event,machine\r\n5,add,a\r\n3,end,\r\n")
@example(b"time,event,machine\n0,add,a\n")
@example(b"0,add,a\n" * 20_000 + b"1,stay,a\n")
def test_files_that_are_no_trace_are_refused_with_their_line(data: bytes) -> None:
    """B5, PRO-3: a ValueError that names the file and the line, or a trace; never another exception."""
    try:
        trace = parse_trace(data, source="market")
    except ValueError as error:
        assert re.match(r"market, line \d+: .", str(error)), error
    else:
        live: set[str] = set()
        assert trace.end >= 0 and [one.at for one in trace.changes] == sorted(one.at for one in trace.changes)
        for change in trace.changes:  # a machine goes only if it is there
            assert set(change.removed) <= live
            live = live - set(change.removed)
            assert not set(change.added) & live
            live |= set(change.added)


def test_a_trace_can_be_cut_and_continued() -> None:
    trace = parse_trace(b"0,add,a\n60000,add,b\n", source="market")
    assert trace.cut(30).machine_seconds == 30
    assert trace.cut(100).machine_seconds == 100 + 40


def test_every_removal_is_announced_once_and_not_before_its_machine_is_there() -> None:
    """B5, PRO-3: a stay that is shorter than the notice; a removal that the trace announces; a return."""
    first = "seconds,event,machine\n0,add,a\n100,add,b\n130,remove,b\n150,notice,a\n200,remove,a\n"
    trace = parse_trace(f"{first}300,add,a\n500,remove,a\n".encode(), source="market")
    assert trace.notices(60.0) == [(100.0, "b", 130.0), (440.0, "a", 500.0)]
    assert trace.notices(0.0) == []
