"""Every sample reaches its target once and in order, for any shares on both sides."""

from hypothesis import given
from hypothesis import strategies as st

from varuna.execute.step.spans import PeerSlice, divide, even_spans, size, slice_for_peers, spans, within

counts = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[tuple[int, int], ...]]]:
    """Draw a batch and several sides that split it in any sizes, also empty ones."""
    num_samples = draw(st.integers(0, 30))
    sides = []
    for _ in range(draw(st.integers(1, 4))):
        bounds = sorted(draw(st.lists(st.integers(0, num_samples), max_size=5)))
        sides.append(tuple(zip([0, *bounds], [*bounds, num_samples], strict=True)))
    return num_samples, sides


def listed(runs):
    return [sample for first, stop in runs for sample in range(first, stop)]


def test_the_second_of_three_sends_samples_to_both_of_two():
    three, two = even_spans(12, parts=3), even_spans(12, parts=2)
    assert slice_for_peers(((0, 12),), three[1], two) == (PeerSlice(0, 0, 2), PeerSlice(1, 2, 4))
    assert slice_for_peers(((0, 12),), two[0], three) == (PeerSlice(0, 0, 4), PeerSlice(1, 4, 6))


def test_equal_shares_have_a_single_peer():
    side = even_spans(11, parts=4)
    assert [slice_for_peers(((0, 11),), own, side) for own in side] == [
        (PeerSlice(peer, 0, stop - first),) for peer, (first, stop) in enumerate(side)
    ]


@given(batches(), st.integers(1, 7))
def test_every_sample_reaches_its_member_once_and_in_order(batch, microbatches):
    num_samples, sides = batch
    one, other = sides[0], sides[-1]
    for runs in (((0, num_samples),), *divide(tuple(sides), microbatches)):
        for receiver, span in enumerate(other):
            arrived = []
            for sender, theirs in enumerate(one):
                own = listed(within(runs, theirs))
                sent = [
                    own[p.first : p.stop] for p in slice_for_peers(runs, theirs, other) if p.peer == receiver
                ]
                expected = [p.stop - p.first for p in slice_for_peers(runs, span, one) if p.peer == sender]
                assert [len(samples) for samples in sent] == expected
                arrived += [sample for samples in sent for sample in samples]
            assert arrived == listed(within(runs, span))


@given(batches(), st.integers(1, 7))
def test_microbatches_cover_the_batch_and_members_have_equally_many_of_each(batch, microbatches):
    num_samples, sides = batch
    divided = divide(tuple(sides), microbatches)
    assert sorted(sample for runs in divided for sample in listed(runs)) == list(range(num_samples))
    for side in sides:
        for span in side:
            sizes = [size(within(runs, span)) for runs in divided]
            assert max(sizes) - min(sizes) <= 1
    for runs in divided:
        assert listed(runs) == sorted(listed(runs))


@given(counts)
def test_spans_follow_each_other(sizes):
    assert [stop - first for first, stop in spans(sizes)] == sizes
    assert listed(spans(sizes)) == list(range(sum(sizes)))
