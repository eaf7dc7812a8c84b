"""Costs of any range of segments: the numbers of a profile, summed once and looked up often.

A number that was not measured is either an error that names what is missing, or an estimate with a
note. `CostTable.take_notes` returns the notes since `start_notes`. No missing number counts as zero.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from math import ceil, log2
from operator import mul
from typing import NamedTuple

import msgspec

from varuna.errors import PlanError
from varuna.types import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Duration,
    LinkCost,
    MessageCost,
    Profile,
    ReduceCost,
    SegmentCost,
    SizeCost,
)

BUCKET_RUNS = 2
"""Full buckets are simulated in this many groups. The last bucket ends at the same time as with all."""


class MessageTimes(NamedTuple):
    """One message over one kind of link, in seconds."""

    sending: float
    latency: float
    spread: float
    sender_seconds: float
    receiver_seconds: float
    sharing: float  # share of the overlap that it loses to an opposite message of its size


class SegmentSums(NamedTuple):
    """All segments at one micro-batch size. Running sums: a range of segments is a difference of two."""

    microbatch_size: int
    forward: list[float]
    forward_only: list[float]
    backward: list[float]
    inputs: list[float]
    weights: list[float]
    variances: tuple[list[float], ...]  # of these five
    activation_bytes: list[float]
    split_bytes: list[float]
    working_bytes: list[float]  # per segment, not summed: segments do not work at the same time
    entry_seconds: list[float]  # per segment, not summed: only the first segment of a stage counts
    sent_bytes: list[int]  # over the cut before each segment; zero at both ends
    returned_bytes: list[int]


class CostTable:
    """Looks up the costs of a profile.

    With `fill_in`, a segment that was not measured with a micro-batch size of other segments scales in
    proportion. Without it, such a size is an error.
    """

    def __init__(self, profile: Profile, *, fill_in: bool = False) -> None:
        self.profile = profile
        self._fill_in = fill_in
        kinds = [profile.kinds[kind] for kind in profile.segments]
        self.num_segments = len(kinds)
        self.parameter_bytes = _sums(kind.parameter_bytes for kind in kinds)
        self.gradient_bytes = _sums(kind.gradient_bytes for kind in kinds)
        self.num_trained = _sums(kind.num_trained for kind in kinds)
        self._nearest_tie = min(
            (right - left for tie in profile.ties for left, right in pairwise(sorted(tie.segments))),
            default=self.num_segments,
        )
        self.cuts_differ = len(set(profile.cuts)) > 1
        self._peaks: dict[int, list[list[float]]] = {}
        self._extremes: dict[int, tuple[int, int]] = {}
        self._sizes: dict[int, tuple[SegmentSums, tuple[str, ...]]] = {}
        self._messages: dict[tuple[bool, int], tuple[MessageTimes, tuple[str, ...]]] = {}
        self._reductions: dict[tuple[int, int, bool], tuple[float, tuple[str, ...]]] = {}
        self._bucket_seconds: dict[tuple[int, int, bool], tuple[float, ...]] = {}
        self._bucket_shares: dict[tuple[int, bool, int, int], tuple[float, ...]] = {}
        self._notes: dict[str, None] | None = None
        self._reduce_points = _by_group((cost, cost.duration) for cost in profile.reductions)
        self._share_points = _by_group((cost, cost.sharing) for cost in profile.reductions)

    def start_notes(self) -> None:
        self._notes = {}

    def take_notes(self) -> tuple[str, ...]:
        """Return one sentence for each estimate since `start_notes`."""
        notes, self._notes = tuple(self._notes or ()), None
        return notes

    def _note(self, notes: tuple[str, ...]) -> None:
        if notes and self._notes is not None:
            self._notes.update(dict.fromkeys(notes))

    def microbatch_sizes(self) -> tuple[int, ...]:
        """Return all measured sizes; without `fill_in`, up to the largest measured with every segment."""
        measured = {size.microbatch_size for kind in self.profile.kinds for size in kind.sizes}
        largest = min(kind.sizes[-1].microbatch_size for kind in self.profile.kinds)
        return tuple(sorted(size for size in measured if size <= largest or self._fill_in))

    def sizes(self, microbatch_size: int) -> SegmentSums:
        if microbatch_size not in self._sizes:
            self._sizes[microbatch_size] = self._add_up(microbatch_size)
        found, notes = self._sizes[microbatch_size]
        self._note(notes)
        return found

    def _add_up(self, microbatch_size: int) -> tuple[SegmentSums, tuple[str, ...]]:
        notes: list[str] = []
        rows = [_at_size(kind, microbatch_size, notes, self._fill_in) for kind in self.profile.kinds]
        columns = list(zip(*(rows[kind] for kind in self.profile.segments), strict=True))
        forward, forward_only, backward, inputs, weights = map(_sums, columns[:5])
        activations, split, working, entry = columns[10:]
        cuts = self.profile.cuts
        sums = SegmentSums(
            microbatch_size,
            *(forward, forward_only, backward, inputs, weights),
            tuple(map(_sums, columns[5:10])),
            _sums(activations),
            _sums(split),
            list(working),
            list(entry),
            [0, *(cut.sent.size(microbatch_size) for cut in cuts), 0],
            [0, *(cut.returned.size(microbatch_size) for cut in cuts), 0],
        )
        return sums, tuple(notes)

    def working_peaks(self, microbatch_size: int) -> list[list[float]]:
        """Return the most working memory of a range, by first segment and number of further segments."""
        if microbatch_size not in self._peaks:
            each = self.sizes(microbatch_size).working_bytes
            self._peaks[microbatch_size] = [
                list(accumulate(each[first:], max)) for first in range(self.num_segments)
            ]
        return self._peaks[microbatch_size]

    def tied_twice(self, first: int, stop: int) -> tuple[int, int]:
        """Return the (bytes, elements) of tied tensors that a sum over a range counts more than once."""
        if stop - first <= self._nearest_tie:
            return 0, 0
        num_bytes = num_elements = 0
        for tie in self.profile.ties:
            extra = max(0, sum(first <= segment < stop for segment in tie.segments) - 1)
            num_bytes += extra * tie.num_bytes
            num_elements += extra * tie.num_elements
        return num_bytes, num_elements

    def extremes(self, microbatch_size: int) -> tuple[int, int]:
        """Return the fewest bytes that a cut sends in either direction, and the most it sends forward."""
        if microbatch_size not in self._extremes:
            sent = [cut.sent.size(microbatch_size) for cut in self.profile.cuts]
            returned = [cut.returned.size(microbatch_size) for cut in self.profile.cuts]
            self._extremes[microbatch_size] = min(min(sent), min(returned)), max(sent)
        return self._extremes[microbatch_size]

    def work_between(self, microbatch_size: int, bounds: Sequence[int]) -> list[float]:
        """Return the seconds of forward and backward from each bound to the next."""
        sizes = self.sizes(microbatch_size)
        return [
            sizes.forward[stop] - sizes.forward[first] + sizes.backward[stop] - sizes.backward[first]
            for first, stop in pairwise(bounds)
        ]

    def message(self, num_bytes: int, *, between: bool) -> MessageTimes:
        key = (between, num_bytes)
        if key not in self._messages:
            link = self.profile.between if between else self.profile.within
            if link is None:
                where = "two machines" if between else "one machine"
                field = "between" if between else "within"
                raise PlanError(
                    f"the profile has no link between workers on {where}: `{field}` is null (profile with "
                    f"workers on {where}, or give the link's latency and bandwidth)"
                )
            self._messages[key] = _message(link, num_bytes, "between machines" if between else "within one")
        found, notes = self._messages[key]
        self._note(notes)
        return found

    def reduce_seconds(self, group_size: int, num_bytes: int, *, between: bool) -> float:
        """Return the time of an all-reduce of `num_bytes` over `group_size` ranks."""
        if group_size == 1:
            return 0.0
        key = (group_size, num_bytes, between)
        if key not in self._reductions:
            self._reductions[key] = self._reduce(group_size, num_bytes, between=between)
        found, notes = self._reductions[key]
        self._note(notes)
        return found

    def reduction_sizes(self, group_size: int, *, between: bool) -> list[int]:
        """Return the sizes between which the time of an all-reduce is linear."""
        measured = {size for points in self._reduce_points[between].values() for size, _ in points}
        link = self.profile.between if between else self.profile.within
        if not measured and link is not None:
            measured = {message.num_bytes * group_size for message in link.messages}
        return sorted(size for size in measured if size) or [1]

    def _reduce(self, group_size: int, num_bytes: int, *, between: bool) -> tuple[float, tuple[str, ...]]:
        groups = self._reduce_points[between]
        where = "between machines" if between else "within one machine"
        if groups:
            seconds, source = _over_group(groups, group_size, num_bytes)
            if not source:
                return seconds, ()
            return seconds, (f"an all-reduce {where} over {group_size} ranks is estimated from {source}",)
        if (self.profile.between if between else self.profile.within) is None:
            raise PlanError(
                f"the profile has neither an all-reduce nor a link {where} (profile with workers there, or "
                "give the link's latency and bandwidth)"
            )
        # A ring: each rank sends a share of the bytes 2(k-1) times.
        share = self.message(ceil(num_bytes / group_size), between=between)
        seconds = 2 * (group_size - 1) * (share.sending + share.latency)
        return seconds, (f"the all-reduce {where} is estimated from the link between two workers",)

    def buckets(
        self, sizes: SegmentSums, first: int, stop: int, *, group_size: int, between: bool, split: bool
    ) -> tuple[tuple[float, float], ...]:
        """Return (share of the last backward when full, seconds to reduce) of each gradient bucket.

        Buckets fill from the last segment on. With a split backward, the share is of the weight part.
        """
        total = int(self.gradient_bytes[stop] - self.gradient_bytes[first]) - self.tied_twice(first, stop)[0]
        if group_size == 1 or total <= 0:
            return ()
        group = (group_size, total, between)
        if group not in self._bucket_seconds or self._notes is not None:
            self._bucket_seconds[group] = self._reduce_buckets(*group)
        place = (sizes.microbatch_size, split, first, stop)
        if place not in self._bucket_shares:
            backward = sizes.weights if split else sizes.backward
            self._bucket_shares[place] = self._fill_buckets(backward, first, stop, total)
        return tuple(zip(self._bucket_shares[place], self._bucket_seconds[group], strict=True))

    def _reduce_buckets(self, group_size: int, total: int, between: bool) -> tuple[float, ...]:
        def seconds(num_bytes: int) -> float:
            return self.reduce_seconds(group_size, num_bytes, between=between)

        if total <= FIRST_BUCKET_BYTES:
            return (seconds(total),)
        runs = _runs(total)
        rest = total - FIRST_BUCKET_BYTES - sum(length for _, length in runs) * BUCKET_BYTES
        middle = [length * seconds(BUCKET_BYTES) for _, length in runs]
        return (seconds(FIRST_BUCKET_BYTES), *middle, seconds(rest))

    def _fill_buckets(self, backward: list[float], first: int, stop: int, total: int) -> tuple[float, ...]:
        """A run starts when its first bucket is full; the last bucket waits for the last gradient."""
        if total <= FIRST_BUCKET_BYTES:
            return (1.0,)
        gradients = self.gradient_bytes
        end = backward[stop]
        span = end - backward[first]
        shares = []
        runs = [FIRST_BUCKET_BYTES + (place + 1) * BUCKET_BYTES for place, _ in _runs(total)]
        for start in (FIRST_BUCKET_BYTES, *runs):
            # Find the segment that completes `start` bytes, counted from the end. All after it are done.
            left = gradients[stop] - start
            after = bisect_left(gradients, left, first + 1, stop + 1)
            own = gradients[after] - gradients[after - 1]
            done = end - backward[after]
            if own:
                done += (gradients[after] - left) / own * (backward[after] - backward[after - 1])
            shares.append(min(1.0, done / span) if span > 0.0 else 1.0)
        return (*shares, 1.0)

    def ending_seconds(self, first: int, stop: int, *, width: int, between: bool, shard: bool) -> float:
        """Return the time of the optimizer and of the engine's work once per step.

        With a sharded optimizer, each replica updates its share and sends it to the others.
        """
        profile = self.profile
        elements = self.num_trained[stop] - self.num_trained[first] - self.tied_twice(first, stop)[1]
        num_bytes = int(self.gradient_bytes[stop] - self.gradient_bytes[first])
        seconds = profile.overheads.step_seconds
        if not elements:
            return seconds
        seconds += profile.optimizer.fixed_seconds
        if not shard or width == 1:
            return seconds + profile.optimizer.seconds_per_element * elements
        if groups := self._share_points[between]:
            sharing = _over_group(groups, width, num_bytes)[0]
        else:  # not measured: half an all-reduce
            sharing = self.reduce_seconds(width, num_bytes, between=between) / 2
        return seconds + profile.optimizer.seconds_per_element * elements / width + sharing


def _at_size(kind: SegmentCost, microbatch_size: int, notes: list[str], fill_in: bool) -> tuple[float, ...]:
    """Return the numbers of `_numbers` at any size, measured or estimated."""
    measured = [size.microbatch_size for size in kind.sizes]
    largest = measured[-1]
    place = bisect_left(measured, microbatch_size)
    if place == len(measured):
        if not fill_in:
            raise PlanError(
                f"micro-batches of {microbatch_size} are larger than any that was measured with all "
                f"segments, {largest} (profile that size, or choose a smaller one)"
            )
        notes.append(f"micro-batches of {microbatch_size} are estimated from {largest} for some segments")
        factor = microbatch_size / largest
        scales = (factor,) * 5 + (factor**2,) * 5 + (factor,) * 4
        return tuple(map(mul, scales, _numbers(kind.sizes[-1])))
    if measured[place] == microbatch_size:
        return _numbers(kind.sizes[place])
    if place == 0:
        notes.append(f"a micro-batch of {microbatch_size} is assumed to cost as much as one of {measured[0]}")
        return _numbers(kind.sizes[0])
    low, high = measured[place - 1], measured[place]
    notes.append(f"micro-batches of {microbatch_size} are interpolated between {low} and {high}")
    share = (microbatch_size - low) / (high - low)
    ends = zip(_numbers(kind.sizes[place - 1]), _numbers(kind.sizes[place]), strict=True)
    return tuple(left + share * (right - left) for left, right in ends)


def _numbers(size: SizeCost) -> tuple[float, ...]:
    """Return five seconds, their variances, and four other numbers."""
    durations = (size.forward, size.forward_only, size.backward, size.backward_inputs, size.backward_weights)
    return (
        *(duration.seconds for duration in durations),
        *(duration.spread**2 for duration in durations),
        size.activation_bytes,
        size.split_bytes,
        size.working_bytes,
        size.entry_seconds,
    )


def _message(link: LinkCost, num_bytes: int, where: str) -> tuple[MessageTimes, tuple[str, ...]]:
    messages = link.messages
    notes: tuple[str, ...] = ()
    if num_bytes > messages[-1].num_bytes:
        notes = (
            f"messages {where} of {num_bytes} bytes are estimated from {messages[-1].num_bytes}, "
            "the largest measured",
        )

    def look_up(value: Callable[[MessageCost], float]) -> float:
        return _between_points([(message.num_bytes, value(message)) for message in messages], num_bytes)

    one_way = look_up(lambda message: message.one_way.seconds)
    both_ways = look_up(lambda message: message.both_ways.seconds)
    latency = 0.0
    if len(messages) > 1:
        size, more = messages[0].num_bytes, messages[1].num_bytes
        seconds, longer = messages[0].one_way.seconds, messages[1].one_way.seconds
        latency = min(seconds, one_way, max(0.0, seconds - size * (longer - seconds) / (more - size)))
    sending = one_way - latency
    sharing = min(1.0, max(0.0, (both_ways - one_way) / sending)) if sending > 0 else 0.0
    found = MessageTimes(
        sending,
        latency,
        look_up(lambda message: message.one_way.spread),
        look_up(lambda message: message.sender_seconds),
        look_up(lambda message: message.receiver_seconds),
        sharing,
    )
    return found, notes


Points = list[tuple[int, float]]
"""(bytes, seconds), ascending."""


def _between_points(points: Points, num_bytes: float) -> float:
    """Interpolate linearly; extrapolate above the last point; return the first value below the first."""
    place = bisect_left(points, (num_bytes, 0.0))
    if place == 0:
        return points[0][1]
    if place == len(points):
        size, value = points[-1]
        if len(points) == 1:
            return value * num_bytes / size if size else value
        before, lower = points[-2]
        slope = max(0.0, value - lower) / (size - before)
        return value + slope * (num_bytes - size)
    (before, lower), (size, value) = points[place - 1], points[place]
    return lower + (value - lower) * (num_bytes - before) / (size - before)


def _by_group(costs: Iterable[tuple[ReduceCost, Duration | None]]) -> dict[bool, dict[int, Points]]:
    """Return the measured points by whether they are between machines, and by group size."""
    found: dict[bool, dict[int, Points]] = {False: {}, True: {}}
    for cost, duration in costs:
        if duration is not None:
            points = found[cost.between_machines].setdefault(cost.group_size, [])
            insort(points, (cost.num_bytes, duration.seconds))
    return found


def _over_group(groups: dict[int, Points], group_size: int, num_bytes: int) -> tuple[float, str]:
    """Return seconds, and the group sizes they are estimated from; "" if this size was measured."""
    if group_size in groups:
        return _between_points(groups[group_size], num_bytes), ""
    smaller = max((size for size in groups if size < group_size), default=None)
    larger = min((size for size in groups if size > group_size), default=None)
    if smaller is not None and larger is not None:
        low = _between_points(groups[smaller], num_bytes)
        high = _between_points(groups[larger], num_bytes)
        share = (group_size - smaller) / (larger - smaller)
        return low + share * (high - low), f"{smaller} and {larger}"
    nearest = smaller if smaller is not None else larger
    assert nearest is not None
    # Latency scales with the logarithm of the group size, the rest with 2(k-1)/k, the share each moves.
    seconds = _between_points(groups[nearest], num_bytes)
    latency = min(seconds, groups[nearest][0][1])
    moved = ((group_size - 1) / group_size) / ((nearest - 1) / nearest)
    return latency * log2(group_size) / log2(nearest) + (seconds - latency) * moved, str(nearest)


def assumed_link(latency_seconds: float, bytes_per_second: float) -> LinkCost:
    """Return a link from its nominal latency and bandwidth, without overhead of sender and receiver."""
    if not (latency_seconds > 0 and bytes_per_second > 0):
        raise PlanError(
            f"a link needs a latency and a bandwidth above zero, not {latency_seconds} s and "
            f"{bytes_per_second} bytes/s"
        )
    sizes = (1 << 10, 1 << 30)
    times = [Duration(latency_seconds + size / bytes_per_second) for size in sizes]
    return LinkCost(tuple(MessageCost(size, t, t, 0.0, 0.0) for size, t in zip(sizes, times, strict=True)))


def with_network(profile: Profile, latency_seconds: float, bytes_per_second: float) -> Profile:
    """Return the profile with another network between machines; reductions over it are estimated."""
    return msgspec.structs.replace(
        profile,
        between=assumed_link(latency_seconds, bytes_per_second),
        reductions=tuple(cost for cost in profile.reductions if not cost.between_machines),
        notes=(
            *profile.notes,
            f"the network between machines is assumed: {bytes_per_second * 8 / 1e9:g} Gbit/s, "
            f"{latency_seconds * 1e6:g} µs",
        ),
    )


def _runs(total: int) -> list[tuple[int, int]]:
    """Return (first bucket, number of buckets) of each run of full buckets, without the first and last."""
    number = ceil((total - FIRST_BUCKET_BYTES) / BUCKET_BYTES) - 1
    length = max(1, ceil(number / BUCKET_RUNS))
    return [(place, min(length, number - place)) for place in range(0, number, length)]


def _sums(values: Iterable[float]) -> list[float]:
    return [0, *accumulate(values)]
