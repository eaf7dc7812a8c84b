"""What a span of segments costs: a profile's numbers, summed once and looked up often.

Whatever was not measured is either an error that names what is missing, or an estimate that says
so: `Costs.take_notes` tells in words what has been estimated since `start_notes`. Nothing that was
not measured is ever taken as zero.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import ceil, log2
from typing import NamedTuple

import msgspec

from varuna.errors import PlanError
from varuna.types import Duration, LinkCost, MessageCost, Profile, ReduceCost, SegmentCost, SizeCost

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""As `varuna.execute.update.reduce` fills its buckets; a test holds both against each other."""
FEW_RUNS = 2
"""Buckets are taken in so many runs: whether they queue or wait for gradients, the last ends as it would."""


class Message(NamedTuple):
    """One message over one kind of link, in seconds."""

    sending: float
    latency: float
    spread: float
    leaving: float  # the sender's own part
    taking: float  # the receiver's
    sharing: float  # of the time that it meets one of its size, the part that it loses


class Sizes(NamedTuple):
    """All segments at one micro-batch size: running sums, from which any span follows by a difference."""

    microbatch_size: int
    forward: list[float]
    forward_only: list[float]
    backward: list[float]
    inputs: list[float]
    weights: list[float]
    variances: tuple[list[float], ...]  # of these five
    activation_bytes: list[float]
    split_bytes: list[float]
    working_bytes: list[float]  # of each segment: no sums, for they are not in use together
    entry_seconds: list[float]  # of each segment: only that counts with which a stage begins
    sent_bytes: list[int]  # over the cut before each segment; zero at both ends
    returned_bytes: list[int]


class Costs:
    """A profile, made ready for many questions.

    With `fill_in`, a segment that was not run with a micro-batch size that others were is taken to grow in
    proportion; else such a size is an error.
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
        self._sizes: dict[int, tuple[Sizes, tuple[str, ...]]] = {}
        self._messages: dict[tuple[bool, int], tuple[Message, tuple[str, ...]]] = {}
        self._reductions: dict[tuple[int, int, bool], tuple[float, tuple[str, ...]]] = {}
        self._bucket_seconds: dict[tuple[int, int, bool], tuple[float, ...]] = {}
        self._bucket_shares: dict[tuple[int, bool, int, int], tuple[float, ...]] = {}
        self._notes: dict[str, None] | None = None
        near_and_far = {
            between: [cost for cost in profile.reductions if cost.between_machines is between]
            for between in (False, True)
        }
        self._by_group = {
            between: _by_group((cost, cost.duration) for cost in costs)
            for between, costs in near_and_far.items()
        }
        self._shared_by_group = {
            between: _by_group((cost, cost.sharing) for cost in costs)
            for between, costs in near_and_far.items()
        }

    # ------------------------------------------------------------ what was estimated

    def start_notes(self) -> None:
        self._notes = {}

    def take_notes(self) -> tuple[str, ...]:
        """What has been estimated since they were started."""
        notes, self._notes = tuple(self._notes or ()), None
        return notes

    # ------------------------------------------------------------ segments

    def microbatch_sizes(self) -> tuple[int, ...]:
        """All that were measured, up to the largest that every segment ran with, if none is filled in."""
        measured = {size.microbatch_size for kind in self.profile.kinds for size in kind.sizes}
        largest = min(kind.sizes[-1].microbatch_size for kind in self.profile.kinds)
        return tuple(sorted(size for size in measured if size <= largest or self._fill_in))

    def sizes(self, microbatch_size: int) -> Sizes:
        if microbatch_size not in self._sizes:
            notes: dict[str, None] = {}
            rows = [_at_size(kind, microbatch_size, notes, self._fill_in) for kind in self.profile.kinds]
            of = [rows[kind] for kind in self.profile.segments]
            cuts = self.profile.cuts
            forward, forward_only, backward, inputs, weights = (
                _sums(row.seconds[kind] for row in of) for kind in range(5)
            )
            found = Sizes(
                microbatch_size,
                forward,
                forward_only,
                backward,
                inputs,
                weights,
                tuple(_sums(row.variances[kind] for row in of) for kind in range(5)),
                _sums(row.activation_bytes for row in of),
                _sums(row.split_bytes for row in of),
                [row.working_bytes for row in of],
                [row.entry_seconds for row in of],
                [0, *(cut.sent.size(microbatch_size) for cut in cuts), 0],
                [0, *(cut.returned.size(microbatch_size) for cut in cuts), 0],
            )
            self._sizes[microbatch_size] = found, tuple(notes)
        found, noted = self._sizes[microbatch_size]
        if noted and self._notes is not None:
            self._notes.update(dict.fromkeys(noted))
        return found

    def working_peaks(self, microbatch_size: int) -> list[list[float]]:
        """By first segment and further ones: the most that any of a span needs while it works."""
        if microbatch_size not in self._peaks:
            each = self.sizes(microbatch_size).working_bytes
            self._peaks[microbatch_size] = [
                list(accumulate(each[first:], max)) for first in range(self.num_segments)
            ]
        return self._peaks[microbatch_size]

    def tied_twice(self, first: int, stop: int) -> tuple[int, int]:
        """The (bytes, elements) of tied tensors that a span would count more than once."""
        if stop - first <= self._nearest_tie:
            return 0, 0
        num_bytes = num_elements = 0
        for tie in self.profile.ties:
            extra = sum(first <= segment < stop for segment in tie.segments) - 1
            if extra > 0:
                num_bytes += extra * tie.num_bytes
                num_elements += extra * tie.num_elements
        return num_bytes, num_elements

    def extremes(self, microbatch_size: int) -> tuple[int, int]:
        """The fewest bytes that any cut sends either way, and the most that any sends forward."""
        if microbatch_size not in self._extremes:
            sent = [cut.sent.size(microbatch_size) for cut in self.profile.cuts]
            returned = [cut.returned.size(microbatch_size) for cut in self.profile.cuts]
            self._extremes[microbatch_size] = min(min(sent), min(returned)), max(sent)
        return self._extremes[microbatch_size]

    def work_between(self, microbatch_size: int, bounds: Sequence[int]) -> list[float]:
        """Seconds of forward and backward from each bound to the next."""
        sizes = self.sizes(microbatch_size)
        return [
            sizes.forward[stop] - sizes.forward[first] + sizes.backward[stop] - sizes.backward[first]
            for first, stop in pairwise(bounds)
        ]

    # ------------------------------------------------------------ links

    def message(self, num_bytes: int, *, between: bool) -> Message:
        key = (between, num_bytes)
        if key not in self._messages:
            link = self.profile.between if between else self.profile.within
            if link is None:
                where = "two machines" if between else "one machine"
                field = "between" if between else "within"
                raise PlanError(
                    f"the profile holds no link of neighbours on {where}: `{field}` is null (profile with "
                    f"workers on {where}, or give the link's latency and bandwidth)"
                )
            self._messages[key] = _message(link, num_bytes, "between machines" if between else "within one")
        found, noted = self._messages[key]
        if noted and self._notes is not None:
            self._notes.update(dict.fromkeys(noted))
        return found

    # ------------------------------------------------------------ reductions

    def reduce_seconds(self, group_size: int, num_bytes: int, *, between: bool) -> float:
        if group_size == 1:
            return 0.0
        key = (group_size, num_bytes, between)
        if key not in self._reductions:
            self._reductions[key] = self._reduce(group_size, num_bytes, between=between)
        found, noted = self._reductions[key]
        if noted and self._notes is not None:
            self._notes.update(dict.fromkeys(noted))
        return found

    def reduction_sizes(self, group_size: int, *, between: bool) -> list[int]:
        """The sizes between which the time of an all-reduce is a straight line."""
        measured = {size for points in self._by_group[between].values() for size, _ in points}
        link = self.profile.between if between else self.profile.within
        if not measured and link is not None:
            measured = {message.num_bytes * group_size for message in link.messages}
        return sorted(size for size in measured if size) or [1]

    def _reduce(self, group_size: int, num_bytes: int, *, between: bool) -> tuple[float, tuple[str, ...]]:
        groups = self._by_group[between]
        where = "between machines" if between else "within one machine"
        if not groups:
            return self._reduce_by_link(group_size, num_bytes, between=between, where=where)
        seconds, source = _over_group(groups, group_size, num_bytes)
        if not source:
            return seconds, ()
        return seconds, (f"an all-reduce {where} over {group_size} ranks is estimated from {source}",)

    def share_seconds(self, group_size: int, num_bytes: int, *, between: bool) -> float:
        """Each owner's share of so many bytes to all others: where not measured, half of an all-reduce."""
        groups = self._shared_by_group[between]
        if not groups:
            return self.reduce_seconds(group_size, num_bytes, between=between) / 2
        return _over_group(groups, group_size, num_bytes)[0]

    def _reduce_by_link(
        self, group_size: int, num_bytes: int, *, between: bool, where: str
    ) -> tuple[float, tuple[str, ...]]:
        """A ring of neighbours: each sends its share 2(k-1) times."""
        if (self.profile.between if between else self.profile.within) is None:
            raise PlanError(
                f"the profile holds neither an all-reduce nor a link {where} (profile with workers there, or "
                "give the link's latency and bandwidth)"
            )
        part = self.message(ceil(num_bytes / group_size), between=between)
        seconds = 2 * (group_size - 1) * (part.sending + part.latency)
        return seconds, (f"the all-reduce {where} is estimated from the link between neighbours",)

    def buckets(
        self, sizes: Sizes, first: int, stop: int, *, group_size: int, between: bool, split: bool
    ) -> tuple[tuple[float, float], ...]:
        """After which share of the last backward each bucket of gradients is full, and how long it takes.

        The last segment's come first. Of a backward in two parts the second counts.
        """
        total = int(self.gradient_bytes[stop] - self.gradient_bytes[first]) - self.tied_twice(first, stop)[0]
        if group_size == 1 or total <= 0:
            return ()
        way = (group_size, total, between)
        if way not in self._bucket_seconds or self._notes is not None:
            self._bucket_seconds[way] = self._reduce_buckets(*way)
        place = (sizes.microbatch_size, split, first, stop)
        if place not in self._bucket_shares:
            backward = sizes.weights if split else sizes.backward
            self._bucket_shares[place] = self._fill_buckets(backward, first, stop, total)
        return tuple(zip(self._bucket_shares[place], self._bucket_seconds[way], strict=True))

    def _reduce_buckets(self, group_size: int, total: int, between: bool) -> tuple[float, ...]:
        def seconds(num_bytes: int) -> float:
            return self.reduce_seconds(group_size, num_bytes, between=between)

        if total <= FIRST_BUCKET_BYTES:
            return (seconds(total),)
        middle = _middle_buckets(total)
        runs = [length * seconds(BUCKET_BYTES) for _, length in _runs(middle)]
        rest = total - FIRST_BUCKET_BYTES - middle * BUCKET_BYTES
        return (seconds(FIRST_BUCKET_BYTES), *runs, seconds(rest))

    def _fill_buckets(self, backward: list[float], first: int, stop: int, total: int) -> tuple[float, ...]:
        """A run goes under way with its first bucket; the last bucket of all waits for the last gradient."""
        if total <= FIRST_BUCKET_BYTES:
            return (1.0,)
        gradients = self.gradient_bytes
        end = backward[stop]
        span = end - backward[first]
        shares = []
        runs = [FIRST_BUCKET_BYTES + (place + 1) * BUCKET_BYTES for place, _ in _runs(_middle_buckets(total))]
        for start in (FIRST_BUCKET_BYTES, *runs):
            # The segment in which so many bytes, counted from the end, are reached: all after it are done.
            left = gradients[stop] - start
            after = bisect_left(gradients, left, first + 1, stop + 1)
            own = gradients[after] - gradients[after - 1]
            done = end - backward[after]
            if own:
                done += (gradients[after] - left) / own * (backward[after] - backward[after - 1])
            shares.append(min(1.0, done / span) if span > 0.0 else 1.0)
        return (*shares, 1.0)

    # ------------------------------------------------------------ the end of a step

    def ending_seconds(self, first: int, stop: int, *, width: int, between: bool, shard: bool) -> float:
        """The optimizer, and what the engine does once a step.

        Where each replica keeps a share of the optimizer's state, it updates that share and sends it to
        the others.
        """
        profile = self.profile
        elements = self.num_trained[stop] - self.num_trained[first] - self.tied_twice(first, stop)[1]
        num_bytes = int(self.gradient_bytes[stop] - self.gradient_bytes[first])
        seconds = profile.overheads.step_seconds
        if not elements:
            return seconds
        seconds += profile.optimizer.fixed_seconds
        if shard and width > 1:
            sharing = self.share_seconds(width, num_bytes, between=between)
            return seconds + profile.optimizer.seconds_per_element * elements / width + sharing
        return seconds + profile.optimizer.seconds_per_element * elements


class _Row(NamedTuple):
    seconds: tuple[float, float, float, float, float]
    variances: tuple[float, float, float, float, float]
    activation_bytes: float
    split_bytes: float
    working_bytes: float
    entry_seconds: float


def _at_size(kind: SegmentCost, microbatch_size: int, notes: dict[str, None], fill_in: bool) -> _Row:
    measured = [size.microbatch_size for size in kind.sizes]
    place = bisect_left(measured, microbatch_size)
    if place == len(measured) and fill_in:
        notes[f"micro-batches of {microbatch_size} are estimated from {measured[-1]} for some segments"] = (
            None
        )
        return _scaled(_row(kind.sizes[-1]), microbatch_size / measured[-1])
    if place == len(measured):
        raise PlanError(
            f"micro-batches of {microbatch_size} are larger than any that was measured with all segments, "
            f"{measured[-1]} (profile that size, or choose a smaller one)"
        )
    if measured[place] == microbatch_size:
        return _row(kind.sizes[place])
    if place == 0:
        notes[f"a micro-batch of {microbatch_size} is taken to cost as much as one of {measured[0]}"] = None
        return _row(kind.sizes[0])
    low, high = _row(kind.sizes[place - 1]), _row(kind.sizes[place])
    share = (microbatch_size - measured[place - 1]) / (measured[place] - measured[place - 1])
    notes[
        f"micro-batches of {microbatch_size} are interpolated between "
        f"{measured[place - 1]} and {measured[place]}"
    ] = None

    def mix(left: float, right: float) -> float:
        return left + share * (right - left)

    return _Row(
        tuple(map(mix, low.seconds, high.seconds)),  # type: ignore[arg-type]
        tuple(map(mix, low.variances, high.variances)),  # type: ignore[arg-type]
        *map(mix, low[2:], high[2:]),
    )


def _scaled(row: _Row, factor: float) -> _Row:
    return _Row(
        tuple(factor * seconds for seconds in row.seconds),  # type: ignore[arg-type]
        tuple(factor**2 * variance for variance in row.variances),  # type: ignore[arg-type]
        *(factor * value for value in row[2:]),
    )


def _row(size: SizeCost) -> _Row:
    durations = (
        size.forward,
        size.forward_only,
        size.backward,
        size.backward_inputs,
        size.backward_weights,
    )
    return _Row(
        tuple(duration.seconds for duration in durations),  # type: ignore[arg-type]
        tuple(duration.spread**2 for duration in durations),  # type: ignore[arg-type]
        size.activation_bytes,
        size.split_bytes,
        size.working_bytes,
        size.entry_seconds,
    )


def _message(link: LinkCost, num_bytes: int, where: str) -> tuple[Message, tuple[str, ...]]:
    messages = link.messages
    notes: tuple[str, ...] = ()
    if num_bytes > messages[-1].num_bytes:
        notes = (
            f"messages {where} of {num_bytes} bytes are estimated from {messages[-1].num_bytes}, "
            "the largest measured",
        )

    def look_up(values: Sequence[float]) -> float:
        points = [(message.num_bytes, value) for message, value in zip(messages, values, strict=True)]
        return _between_points(points, num_bytes)

    one_way = look_up([message.one_way.seconds for message in messages])
    both_ways = look_up([message.both_ways.seconds for message in messages])
    latency = 0.0
    if len(messages) > 1:
        (size, seconds), (more, longer) = (
            (message.num_bytes, message.one_way.seconds) for message in messages[:2]
        )
        latency = min(seconds, one_way, max(0.0, seconds - size * (longer - seconds) / (more - size)))
    sending = one_way - latency
    sharing = min(1.0, max(0.0, (both_ways - one_way) / sending)) if sending > 0 else 0.0
    found = Message(
        sending,
        latency,
        look_up([message.one_way.spread for message in messages]),
        look_up([message.sender_seconds for message in messages]),
        look_up([message.receiver_seconds for message in messages]),
        sharing,
    )
    return found, notes


def _between_points(points: Sequence[tuple[int, float]], num_bytes: float) -> float:
    """Between two measured sizes a straight line, above the last in proportion, below the first as it."""
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


Points = list[tuple[int, float]]


def _by_group(costs: Iterable[tuple[ReduceCost, Duration | None]]) -> dict[int, Points]:
    """(bytes, seconds), ascending, by the size of the group."""
    found: dict[int, Points] = {}
    for cost, duration in costs:
        if duration is not None:
            found.setdefault(cost.group_size, []).append((cost.num_bytes, duration.seconds))
    return {size: sorted(points) for size, points in found.items()}


def _over_group(groups: dict[int, Points], group_size: int, num_bytes: int) -> tuple[float, str]:
    """Seconds; and of which groups they were made, where that one was not measured."""
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
    return _regroup(groups[nearest], nearest, group_size, num_bytes), str(nearest)


def _regroup(points: Sequence[tuple[int, float]], measured: int, wanted: int, num_bytes: int) -> float:
    """Small messages take steps that grow as the logarithm of a group; of large ones, each rank moves
    2(k-1)/k times the whole."""
    seconds = _between_points(points, num_bytes)
    latency = min(seconds, points[0][1])
    moved = ((wanted - 1) / wanted) / ((measured - 1) / measured)
    return latency * log2(wanted) / log2(measured) + (seconds - latency) * moved


def assumed_link(latency_seconds: float, bytes_per_second: float) -> LinkCost:
    """A link that nobody measured: what its makers promise, with nothing lost on either side."""
    if not (latency_seconds > 0 and bytes_per_second > 0):
        raise PlanError(
            f"a link needs a latency and a bandwidth above zero, not {latency_seconds} s and "
            f"{bytes_per_second} bytes/s"
        )
    return LinkCost(
        tuple(
            MessageCost(size, Duration(seconds), Duration(seconds), 0.0, 0.0)
            for size in (1 << 10, 1 << 30)
            for seconds in (latency_seconds + size / bytes_per_second,)
        )
    )


def with_network(profile: Profile, latency_seconds: float, bytes_per_second: float) -> Profile:
    """The same profile with another network between the machines; reductions over it are then estimated."""
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


def _middle_buckets(total: int) -> int:
    """Full ones between the small first and the last."""
    return ceil((total - FIRST_BUCKET_BYTES) / BUCKET_BYTES) - 1


def _runs(number: int) -> list[tuple[int, int]]:
    """(first bucket, buckets) of each run."""
    length = max(1, ceil(number / FEW_RUNS))
    return [(place, min(length, number - place)) for place in range(0, number, length)]


def _sums(values: Iterable[float]) -> list[float]:
    return [0, *accumulate(values)]
