"""The promises of every store, tested with a local folder and, through fsspec, in memory."""

import array
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna.checkpoint.store.local import LocalStore
from varuna.checkpoint.store.remote import RemoteStore
from varuna.checkpoint.store.spans import merge_spans, split_ranges
from varuna.checkpoint.store.store import Entry, Store, open_store

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=["folder", "memory", "renaming"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"))
    return open_store(f"{request.param}://{secrets.token_hex(8)}/store")


class Renaming(MemoryFileSystem):
    """A file server: a put is seen while it lasts, a rename is not."""

    protocol = "renaming"
    in_the_middle: Callable[[], None] = staticmethod(lambda: None)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        super().pipe_file(path, value[: len(value) // 2])
        type(self).in_the_middle()
        super().pipe_file(path, value)


fsspec.register_implementation("renaming", Renaming, clobber=True)

names = st.text("abcdefghij_.-0123456789", min_size=1, max_size=12).filter(
    lambda name: name.strip(".") and not name.startswith(".varuna-")
)
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
chunks = st.lists(
    st.one_of(
        st.binary(max_size=50),
        st.integers(0, 3 << 20).map(lambda size: bytes([size % 251]) * size),
    ),
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(path=paths, chunks=chunks, cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4))
@pytest.mark.parametrize("scheme", ["folder", "memory"])
def test_what_is_written_is_read_back_whole_and_in_spans(
    scheme: str, path: str, chunks: list[bytes], cuts: list[tuple[float, float]], tmp_path_factory
) -> None:
    place = secrets.token_hex(8)
    store = open_store(
        f"memory://{place}" if scheme == "memory" else str(tmp_path_factory.mktemp("store") / place)
    )
    whole = b"".join(chunks)
    store.write(path, lambda: chunks)
    assert store.read(path) == whole
    assert store.size(path) == len(whole)
    spans = [(int(min(a, b) * len(whole)), int(max(a, b) * len(whole))) for a, b in cuts]
    found = store.read_spans(path, spans)
    assert [bytes(view) for view in found] == [whole[first:stop] for first, stop in spans]
    assert all(view.readonly for view in found)
    folder, _, name = path.rpartition("/")
    assert store.list(folder) == [Entry(name=name, is_folder=False, size=len(whole))]


@settings(deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60)), max_size=12),
    gap=st.integers(0, 40),
    longest=st.integers(1, 70),
)
def test_ranges_hold_each_byte_of_the_spans_once_and_nothing_but_small_gaps(
    spans: list[tuple[int, int]], gap: int, longest: int
) -> None:
    spans = [(first, first + length) for first, length in spans]
    ranges = split_ranges(merge_spans(spans, gap=gap), longest=longest)
    fetched = [byte for first, stop in ranges for byte in range(first, stop)]
    wanted = {byte for first, stop in spans for byte in range(first, stop)}
    assert len(fetched) == len(set(fetched)) and wanted <= set(fetched)
    assert all(0 < stop - first <= longest for first, stop in ranges)
    assert all(any(near in wanted for near in range(byte - gap, byte + gap + 1)) for byte in fetched)


def test_writing_again_leaves_only_the_new_content(store: Store) -> None:
    store.write("folder/part", lambda: [b"a longer one"])
    store.write("folder/part", lambda: [b"short"])
    assert store.read("folder/part") == b"short"


def test_a_chunk_may_be_reused_after_the_next_one_is_requested(store: Store) -> None:
    def one_buffer(size: int) -> Iterator[bytearray]:
        buffer = bytearray(size)
        for number in range(4):
            buffer[:] = bytes([number]) * size
            yield buffer

    for size in (3, 1 << 20):
        store.write("part", lambda size=size: one_buffer(size))
        assert store.read("part") == b"".join(bytes([number]) * size for number in range(4))


def test_chunks_of_any_type_are_written_as_their_bytes(store: Store) -> None:
    numbers = array.array("d", range(100_000))
    few = memoryview(array.array("d", range(6))).cast("B").cast("d", shape=[2, 3])
    store.write("part", lambda: [memoryview(numbers), few, memoryview(b"").cast("B")])
    assert store.read("part") == numbers.tobytes() + few.tobytes()


def test_an_empty_file_and_an_empty_span_can_be_read(store: Store) -> None:
    store.write("empty", lambda: [])
    assert [bytes(view) for view in store.read_spans("empty", [(0, 0), (0, 0)])] == [b"", b""]
    assert store.read_spans("empty", []) == []
    store.write("some", lambda: [b"abc"])
    assert [bytes(view) for view in store.read_spans("some", [(3, 3), (1, 2), (0, 0)])] == [b"", b"b", b""]


def test_a_span_beyond_the_end_names_the_path_the_size_and_the_span(store: Store) -> None:
    store.write("folder/part", lambda: [b"abc"])
    for span in [(0, 4), (7, 7), (2, 9)]:
        with pytest.raises(EOFError) as caught:
            store.read_spans("folder/part", [(0, 1), span])
        assert f"{store.url}/folder/part has 3 bytes" in str(caught.value)
        assert f"{span[0]}..{span[1]}" in str(caught.value)
    for span in [(2, 1), (-1, 2)]:
        with pytest.raises(ValueError, match=r"0 <= first <= stop"):
            store.read_spans("folder/part", [span])


def test_what_is_not_there_is_a_file_not_found_that_names_it(store: Store) -> None:
    for ask in (store.read, store.size, lambda path: store.read_spans(path, [])):
        with pytest.raises(FileNotFoundError) as caught:
            ask("folder/none")
        assert f"{store.url}/folder/none" in str(caught.value)
    assert store.list() == store.list("folder") == []
    store.remove("folder/none")
    store.remove("folder")


def test_a_folder_is_not_a_file(store: Store) -> None:
    store.write("folder/part", lambda: [b"abc"])
    for ask in (store.size, lambda path: store.read_spans(path, [])):
        with pytest.raises(IsADirectoryError, match="folder"):
            ask("folder")
    assert store.list("folder/part") == []


def test_a_listing_is_sorted_and_shows_folders_and_sizes(store: Store) -> None:
    store.write("b", lambda: [b"12"])
    store.write("a/x", lambda: [b"1"])
    store.replace("c", b"123")
    store.write("aa/y/z", lambda: [b"1"])
    assert store.list() == [
        Entry(name="a", is_folder=True, size=0),
        Entry(name="aa", is_folder=True, size=0),
        Entry(name="b", is_folder=False, size=2),
        Entry(name="c", is_folder=False, size=3),
    ]


def test_removing_a_folder_takes_its_files_and_no_others(store: Store) -> None:
    for path in ("one/manifest.json", "one/deep/part", "one/part", "one_more/part", "two/part"):
        store.write(path, lambda: [b"x"])
    store.remove("one")
    store.remove("two/part")
    assert [entry.name for entry in store.list() if entry.is_folder and store.list(entry.name)] == [
        "one_more"
    ]


BAD_PATHS = [
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "",
    "a//b",
    "a/",
    ".",
    "./a",
    "a\\..\\b",
    "a\0b",
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_that_could_lead_out_is_refused_before_anything_is_touched(path: str, store: Store) -> None:
    """V37: nor can a manifest lead anywhere else."""

    def untouched() -> Iterator[bytes]:
        raise AssertionError("requested content")

    attempts = [
        lambda: store.size(path),
        lambda: store.read(path),
        lambda: store.read_spans(path, [(0, 1)]),
        lambda: store.write(path, untouched),
        lambda: store.replace(path, b"x"),
        lambda: store.remove(path),
        lambda: store.list(path or ".."),
    ]
    for attempt in attempts:
        with pytest.raises(ValueError, match="relative"):
            attempt()
    if isinstance(store, LocalStore):
        assert not os.path.exists(store.url)


def test_a_failing_source_leaves_nothing_and_keeps_its_error(store: Store) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x" * (1 << 20)
        raise KeyError("the source failed")

    with pytest.raises(KeyError, match="the source failed"):
        store.write("folder/part", failing)
    assert store.list("folder") == []


def test_where_a_put_can_be_seen_half_done_a_reader_still_sees_old_or_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(f"renaming://{secrets.token_hex(8)}")
    store.replace("folder/manifest.json", b"the old one")
    seen = []
    monkeypatch.setattr(Renaming, "in_the_middle", lambda: seen.append(store.read("folder/manifest.json")))
    store.replace("folder/manifest.json", b"the new one")
    assert seen == [b"the old one"]
    assert store.read("folder/manifest.json") == b"the new one"
    assert [entry.name for entry in store.list("folder")] == ["manifest.json"]


def test_a_failed_put_leaves_only_the_old_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise ConnectionError("lost")

    store = open_store(f"renaming://{secrets.token_hex(8)}")
    store.replace("manifest.json", b"the old one")
    monkeypatch.setattr(Renaming, "in_the_middle", fail)
    with pytest.raises(OSError, match="manifest"):
        store.replace("manifest.json", b"the new one")
    assert store.read("manifest.json") == b"the old one"
    assert [path for path in Renaming.store if store.url in path] == [f"{store.url}/manifest.json"]


def test_a_store_is_known_by_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store("here").url == str(tmp_path / "here")
    assert open_store("~/there").url == str(tmp_path / "home" / "there")
    assert open_store((tmp_path / "with a space").as_uri()).url == str(tmp_path / "with a space")
    assert open_store("memory://there/").url == "memory://there"
    assert isinstance(open_store("memory://there"), RemoteStore)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://x", r"knows no nowhere://.*install the package"),
        ("simplecache::s3://bucket/x", "one scheme"),
        ("file://relative", "absolute"),
        ("", "the store is empty"),
    ],
)
def test_a_url_that_cannot_be_opened_says_what_was_expected(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(url)


IMPORTING = """
import sys
from varuna.checkpoint.store.store import open_store, retrying
store = retrying(open_store("somewhere"), seconds=1, on_wait=print)
store.list()
assert not {"torch", "fsspec", "asyncio"} & set(sys.modules)
sys.modules["obstore"] = None
try:
    open_store("s3://bucket/folder")
except ImportError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_a_local_store_imports_neither_torch_nor_fsspec_and_s3_names_the_missing_package() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORTING], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "s3:// needs a package that is not installed" in run.stdout
    assert "pip install 'varuna-torch[s3]'" in run.stdout
