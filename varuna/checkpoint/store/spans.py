"""Byte ranges of a file: merged into few requests, split into parallel ones, cut back into spans."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

GAP_BYTES = 256 << 10  # reading this many unused bytes is cheaper than another request


def check_spans(spans: Sequence[tuple[int, int]], *, size: int, place: str) -> None:
    for first, stop in spans:
        if not 0 <= first <= stop:
            raise ValueError(f"a span must satisfy 0 <= first <= stop, found {first}..{stop} for {place}")
        if stop > size:
            raise EOFError(f"{place} has {size} bytes, too few for the span {first}..{stop}")


def requests_for(spans: Iterable[tuple[int, int]], *, longest: int) -> list[tuple[int, int]]:
    """Return the byte ranges to request: nearby spans merged, long ranges split for parallel reads."""
    return split_ranges(merge_spans(spans, gap=GAP_BYTES), longest=longest)


def merge_spans(spans: Iterable[tuple[int, int]], *, gap: int) -> list[tuple[int, int]]:
    """Return sorted ranges that cover all spans; spans at most `gap` bytes apart share a range."""
    ranges: list[tuple[int, int]] = []
    for first, stop in sorted(span for span in spans if span[0] < span[1]):
        if ranges and first - ranges[-1][1] <= gap:
            ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
        else:
            ranges.append((first, stop))
    return ranges


def split_ranges(ranges: Iterable[tuple[int, int]], *, longest: int) -> list[tuple[int, int]]:
    return [piece for first, stop in ranges for piece in pairwise([*range(first, stop, longest), stop])]


def cut_span(span: tuple[int, int], ranges: Sequence[tuple[int, int]], pieces: Sequence[bytes]) -> memoryview:
    """Return the bytes of a span from the fetched ranges; no copy if one range holds the whole span."""
    first, stop = span
    if first == stop:
        return memoryview(b"")
    begin = bisect_right(ranges, first, key=lambda piece: piece[0]) - 1
    end = bisect_left(ranges, stop, key=lambda piece: piece[0])
    views = [
        memoryview(piece)[max(first - start, 0) : stop - start]
        for (start, _), piece in zip(ranges[begin:end], pieces[begin:end], strict=True)
    ]
    return views[0] if len(views) == 1 else memoryview(b"".join(views))
