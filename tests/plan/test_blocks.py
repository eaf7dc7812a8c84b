"""Blocks of a model without CutPoints: a chain that loses nothing, cut alike where the model repeats."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from varuna.plan.cut.blocks import FEWEST, MOST, partition
from varuna.plan.cut.order import best_order, crossings, early, late
from varuna.plan.cut.partition import balance
from varuna.types import Operation, OperationGraph, Value


@st.composite
def graphs(draw: st.DrawFn) -> OperationGraph:
    count = draw(st.integers(1, 60))
    flops = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    values = []
    for maker in range(count - 1):
        users = draw(st.sets(st.integers(maker + 1, count - 1), max_size=3))
        if users:
            values.append(Value(maker, tuple(sorted(users)), draw(st.integers(0, 100))))
    return OperationGraph(tuple(Operation(number, 0) for number in flops), tuple(values))


@given(graphs(), st.integers(1, 20), st.integers(0, 20))
def test_blocks_are_a_chain_of_convex_sets_that_lose_nothing(
    graph: OperationGraph, fewest: int, more: int
) -> None:
    """R10: topological, at most as many as allowed, none empty; the same each time."""
    blocks = partition(graph, fewest=fewest, most=fewest + more)
    assert len(blocks) == len(graph.operations)
    assert set(blocks) == set(range(max(blocks) + 1)) and max(blocks) < fewest + more
    for value in graph.values:  # no way back, so no way out of a block and in again
        assert all(blocks[value.made_by] <= blocks[user] for user in value.used_by)
    assert blocks == partition(graph, fewest=fewest, most=fewest + more)


@given(graphs(), st.integers(1, 20))
def test_every_place_left_out_has_one_near_by_that_serves_as_well(graph: OperationGraph, fewest: int) -> None:
    """A stage that would end there loses less by going to the next cut than by what would cross."""
    found = partition(graph, fewest=fewest, most=10**9)
    order = best_order(graph, [3 * operation.flops for operation in graph.operations], windows=fewest)
    blocks = [found[operation] for operation in order]
    assert blocks == sorted(blocks)
    moments, crossings = moments_and_crossings(in_a_row(graph, order))
    whole = moments[-1]
    cuts = [stop for stop in range(1, len(blocks)) if blocks[stop] != blocks[stop - 1]]
    for stop in range(1, len(blocks)):
        if 0 < moments[stop] < whole and crossings[stop]:
            distances = [(abs(moments[cut] - moments[stop]), crossings[cut]) for cut in cuts]
            assert any(
                away <= whole // fewest and over + away <= crossings[stop] for away, over in distances
            ) or any(away == 0 for away, _ in distances)


def in_a_row(graph: OperationGraph, order: Sequence[int]) -> OperationGraph:
    """The same graph, its operations numbered as they run."""
    place = {operation: number for number, operation in enumerate(order)}
    return OperationGraph(
        tuple(graph.operations[operation] for operation in order),
        tuple(
            Value(place[value.made_by], tuple(sorted(place[user] for user in value.used_by)), value.num_bytes)
            for value in graph.values
        ),
    )


def moments_and_crossings(graph: OperationGraph) -> tuple[list[int], list[int]]:
    """Moments and crossings of all places, the long way round."""
    moments = [
        sum(3 * operation.flops for operation in graph.operations[:stop])
        for stop in range(len(graph.operations) + 1)
    ]
    crossings = [
        sum(10_000 * value.num_bytes for value in graph.values if value.made_by < stop <= max(value.used_by))
        for stop in range(len(graph.operations) + 1)
    ]
    return moments, crossings


def transformer(layers: int, *, width: int = 1024, tokens: int = 512) -> OperationGraph:
    """Norm, one projection, attention, another, a sum; norm, up, gelu, down, a sum. Then the head."""
    operations, values = [], []
    residual = 0
    operations.append(Operation(tokens * width, 0))

    def add(flops: int, *operands: int, size: int = 1) -> int:
        operations.append(Operation(flops, 0))
        made = len(operations) - 1
        for operand in operands:
            uses.setdefault(operand, []).append(made)
        sizes[made] = 8 * size * tokens * width
        return made

    uses: dict[int, list[int]] = {}
    sizes: dict[int, int] = {0: 8 * tokens * width}
    square = 2 * tokens * width * width
    for _ in range(layers):
        x = add(tokens * width, residual)
        x = add(3 * square, x, size=3)
        x = add(4 * tokens * tokens * width, x)
        x = add(square, x)
        residual = add(tokens * width, x, residual)
        x = add(tokens * width, residual)
        x = add(4 * square, x, size=4)
        x = add(tokens * width, x, size=4)
        x = add(4 * square, x)
        residual = add(tokens * width, x, residual)
    add(10 * square, residual, size=30)
    values = [Value(maker, tuple(users), sizes[maker]) for maker, users in uses.items()]
    return OperationGraph(tuple(operations), tuple(values))


def test_a_transformer_is_cut_after_its_sums_and_every_layer_alike() -> None:
    """R12: over every cut goes one tensor, for nothing larger is worth it."""
    for layers in (24, 48, 96):
        graph = transformer(layers)
        blocks = partition(graph)
        cuts = [stop for stop in range(1, len(blocks)) if blocks[stop] != blocks[stop - 1]]
        assert cuts == list(range(6, len(blocks), 5))


def test_a_very_deep_model_is_cut_into_whole_layers() -> None:
    """R12: 1000 layers, 10,000 operations: no more blocks than allowed, all but the ends equally long."""
    blocks = partition(transformer(1000))
    cuts = [stop for stop in range(1, len(blocks)) if blocks[stop] != blocks[stop - 1]]
    assert len(cuts) < MOST
    lengths = {right - left for left, right in pairwise(cuts)}
    assert len(lengths) == 1 and lengths.pop() % 10 == 0


@given(graphs())
def test_every_order_runs_all_operations_each_after_what_it_needs(graph: OperationGraph) -> None:
    """R10"""
    for order in (late(graph), early(graph), best_order(graph, [1] * len(graph.operations), windows=4)):
        assert sorted(order) == list(range(len(graph.operations)))
        for value in graph.values:
            assert all(order.index(value.made_by) < order.index(user) for user in value.used_by)


def drawn(needs: Sequence[Sequence[int]], sizes: Sequence[int]) -> OperationGraph:
    """Operations that take equally long; each is given by what it needs, and by how much it makes."""
    users = [
        [user for user, all_needed in enumerate(needs) if maker in all_needed] for maker in range(len(needs))
    ]
    return OperationGraph(
        tuple(Operation(100, 0) for _ in needs),
        tuple(Value(maker, tuple(used), sizes[maker]) for maker, used in enumerate(users) if used),
    )


def test_branches_are_laid_out_one_after_the_other() -> None:
    """R10: wherever a cut is, no more crosses it than the branches that are begun."""
    layers = 40
    towers = [[i - 2] if i > 1 else [] for i in range(2 * layers)]  # two that take turns, and a loss of both
    in_turns = drawn([*towers, [2 * layers - 2, 2 * layers - 1]], [8] * (2 * layers - 2) + [1, 1, 0])
    # A decoder whose layers each read the encoder's end through a projection; all are projected first.
    projected = drawn(
        [[], *([0] for _ in range(layers)), [1], *([layers + i, 1 + i] for i in range(1, layers))],
        [8] * (2 * layers + 1),
    )
    # A loss after each layer, from what it gave; all are taken at the end.
    supervised = drawn(
        [
            [],
            *([i] for i in range(layers)),
            *([i + 1] for i in range(layers)),
            range(layers + 1, 2 * layers + 1),
        ],
        [8] * (layers + 1) + [1] * layers + [0],
    )
    for graph, most in ((in_turns, 9), (projected, 24), (supervised, 8 + layers)):
        order = best_order(graph, [1] * len(graph.operations), windows=FEWEST)
        program = range(len(graph.operations))
        assert max(crossings(graph, order)) <= most < max(crossings(graph, program))


def test_a_program_that_runs_branch_by_branch_keeps_its_order() -> None:
    graph = transformer(6)
    assert best_order(graph, [1] * len(graph.operations), windows=FEWEST) == range(len(graph.operations))


def test_there_are_blocks_enough_for_many_stages_even_where_all_cuts_are_dear() -> None:
    """What crosses falls and falls: the cheapest cuts alone would all be at the end."""
    count = 100
    operations = tuple(Operation(100, 0) for _ in range(count))
    values = tuple(Value(i, (i + 1,), 10 ** (9 - i // 12)) for i in range(count - 1))
    blocks = partition(OperationGraph(operations, values))
    assert max(blocks) + 1 >= FEWEST


def test_of_equally_long_stages_those_are_chosen_between_which_least_travels() -> None:
    costs = [1.0] * 6
    assert balance(costs, stages=2, crossing=[5, 5, 5, 5, 5]) == ((0, 3), (3, 6))
    uneven = [1.0, 1.0, 0.97, 0.03, 1.0, 1.0]
    assert balance(uneven, stages=2, crossing=[9, 9, 9, 1, 9]) == ((0, 4), (4, 6))
    assert balance(uneven, stages=2, crossing=[9, 9, 1, 9, 9]) == ((0, 3), (3, 6))
    assert balance(uneven, stages=2, crossing=[1, 9, 9, 9, 9]) == ((0, 2), (2, 6)), "not at any price"


# ---------------------------------------------------------------- orders of operations


def needs(graph: OperationGraph) -> list[tuple[int, int]]:
    return [(value.made_by, user) for value in graph.values for user in value.used_by]


@given(graphs())
def test_every_order_runs_each_operation_once_after_what_it_needs(graph: OperationGraph) -> None:
    for order in (late(graph), early(graph), best_order(graph, [1] * len(graph.operations), windows=4)):
        place = {operation: number for number, operation in enumerate(order)}
        assert sorted(order) == list(range(len(graph.operations)))
        assert all(place[maker] < place[user] for maker, user in needs(graph))


@given(graphs(), st.data())
def test_crossing_bytes_are_those_of_values_made_before_and_used_after(
    graph: OperationGraph, data: st.DataObject
) -> None:
    order = data.draw(st.sampled_from([list(range(len(graph.operations))), late(graph), early(graph)]))
    place = {operation: number for number, operation in enumerate(order)}
    for stop, num_bytes in enumerate(crossings(graph, order)):
        assert num_bytes == sum(
            value.num_bytes
            for value in graph.values
            if place[value.made_by] < stop <= max(place[user] for user in value.used_by)
        )


@given(graphs())
def test_another_order_is_used_only_if_its_cheapest_cuts_are_clearly_cheaper(graph: OperationGraph) -> None:
    durations = [operation.flops for operation in graph.operations]
    found = best_order(graph, durations, windows=1)
    cheapest = {
        name: min(crossings(graph, order))
        for name, order in (("program", range(len(durations))), ("found", found))
    }
    assert cheapest["found"] <= cheapest["program"]


@given(graphs(), st.integers(1, 12), st.integers(0, 12))
def test_a_block_has_no_path_that_leaves_it_and_comes_back(
    graph: OperationGraph, fewest: int, more: int
) -> None:
    """Convex, by search: from what leaves a block, no later operation leads back into it."""
    blocks = partition(graph, fewest=fewest, most=fewest + more)
    users: dict[int, list[int]] = {}
    for maker, user in needs(graph):
        users.setdefault(maker, []).append(user)
    for block in set(blocks):
        outside = [user for maker, user in needs(graph) if blocks[maker] == block and blocks[user] != block]
        seen = set(outside)
        while outside:
            for user in users.get(outside.pop(), []):
                assert blocks[user] != block
                if user not in seen:
                    seen.add(user)
                    outside.append(user)


@given(st.integers(2, 40), st.integers(2, 30), st.integers(1, 12))
def test_a_chain_of_equal_layers_is_cut_between_layers(layers: int, length: int, fewest: int) -> None:
    """Within a layer ten times as much would travel as between two: no cut is made there."""
    count = layers * length
    values = tuple(
        Value(index, (index + 1,), 1 if (index + 1) % length == 0 else 10_000) for index in range(count - 1)
    )
    graph = OperationGraph(tuple(Operation(10**6, 0) for _ in range(count)), values)
    blocks = partition(graph, fewest=min(fewest, layers), most=count)
    cuts = [index + 1 for index in range(count - 1) if blocks[index] != blocks[index + 1]]
    assert all(cut % length == 0 for cut in cuts)
