"""A model without CutPoints is cut by an algorithm at any place, and computes the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.comparison import assert_same
from tests.capture.models import Everything, batch_of, tokens
from tests.capture.test_hugging_face import MODELS
from tests.toys import make_inputs, make_model, without_cutpoints
from varuna.capture import CutPoint, Source
from varuna.capture.cuts.segment_kinds import find_kinds
from varuna.errors import CaptureError
from varuna.plan.cut.blocks import partition
from varuna.types import OperationGraph

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def cut_everywhere(graph: OperationGraph, order: Sequence[int]) -> Sequence[int]:
    """Cut between all operations in this order if any value crosses."""
    position = {operation: i for i, operation in enumerate(order)}
    crossed = {
        i
        for value in graph.values
        if value.num_bytes
        for i in range(position[value.made_by] + 1, max(position[user] for user in value.used_by) + 1)
    }
    segments = list(accumulate(int(i in crossed) for i in range(len(order))))
    return [segments[position[operation]] for operation in range(len(order))]


def every_operation_apart(graph: OperationGraph) -> Sequence[int]:
    return cut_everywhere(graph, range(len(graph.operations)))


def any_order(graph: OperationGraph) -> Sequence[int]:
    """Cut between all operations in a random valid order."""
    draw = random.Random(3)
    before: list[set[int]] = [set() for _ in graph.operations]
    for value in graph.values:
        for user in value.used_by:
            before[user].add(value.made_by)
    order: list[int] = []
    while len(order) < len(before):
        done = set(order)
        order.append(draw.choice([i for i, needs in enumerate(before) if i not in done and needs <= done]))
    return cut_everywhere(graph, order)


@pytest.mark.parametrize("name", ["llama", "mixtral", "bart", "vit", "resnet"])
def test_a_hugging_face_model_is_cut_between_all_operations(name: str) -> None:
    """B8: any algorithm chooses some of these cuts."""
    torch.manual_seed(0)
    make, _, inputs = MODELS[name]
    model = make().train()
    source = Source(model, partition=every_operation_apart)
    segments = source.capture(inputs, training=True).num_segments
    assert segments > 40
    assert_same(model, inputs, batch=4, source=source, layouts=[[*range(segments + 1)]], **CLOSE)


@pytest.mark.parametrize("cut", [partition, every_operation_apart, any_order])
def test_models_with_changes_in_place_buffers_and_skips_are_cut_correctly(cut: Any) -> None:
    """R5"""
    model = without_cutpoints(Everything(dropout=0.1))
    assert_same(model, tokens(4), batch=4, source=Source(model, partition=cut))
    for name in ("Conv", "Odd", "Counting", "Branching", "Reused"):
        model = make_model(name, cutpoints=False)
        inputs = make_inputs(name, 4, torch.Generator().manual_seed(0))
        captured = assert_same(model, inputs, batch=4, source=Source(model, partition=cut))
        assert captured.num_segments >= 3, name


class Grown(nn.Module):
    """A random graph for each seed: layers, sums of earlier values, and constants."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps = [
            (draw.choice(["layer", "sum", "constant"]), draw.random(), draw.random()) for _ in range(9)
        ]
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(1 + len(self.steps)))
        self.num_constants = sum(kind == "constant" for kind, _, _ in self.steps)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        values = [self.layers[0](x)]
        for (kind, one, other), layer in zip(self.steps, self.layers[1:], strict=True):
            value, second = (values[int(part * len(values))] for part in (one, other))
            if kind == "layer":
                values.append(layer(value))
            elif kind == "sum":
                values.append(value + second)
            else:  # used twice, far apart: both have their own
                constant = torch.arange(6, dtype=torch.float32).cos()
                values += [value * constant, second + constant]
        return F.mse_loss(torch.stack(values).mean(0), y)


@pytest.mark.parametrize("seed", range(6))
def test_a_random_graph_is_cut_between_any_two_operations(seed: int) -> None:
    """R10: constants are recomputed by their users, and segments are in order."""
    torch.manual_seed(seed)
    model = Grown(seed)
    graphs: list[OperationGraph] = []

    def cut(graph: OperationGraph) -> Sequence[int]:
        graphs.append(graph)
        return any_order(graph) if seed % 2 else every_operation_apart(graph)

    source = Source(model, partition=cut)
    captured = source.capture(batch_of(4), training=True)
    (graph,) = graphs
    constants = [i for i, operation in enumerate(graph.operations) if not operation.flops]
    # arange and cos; the others are layers, sums and products, then stack, mean, broadcast and loss
    assert len(constants) == 2 * model.num_constants
    assert len(graph.operations) - len(constants) == 1 + len(model.steps) + model.num_constants + 4
    assert all(not value.num_bytes for value in graph.values if value.made_by in constants)
    for node in captured._flat.nodes:
        for arg in node.all_input_nodes:
            assert arg.meta["segment"] <= node.meta["segment"]
    layouts = [[*range(captured.num_segments + 1)]]
    assert_same(model, batch_of(4), batch=4, source=source, layouts=layouts)


class InTurns(nn.Module):
    """Two towers that the program alternates."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList(nn.Linear(6, 6) for _ in range(8)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for one, other in zip(*self.towers, strict=True):
            x, y = torch.tanh(one(x)), torch.tanh(other(y))
        return F.mse_loss(x.mean(1), y.mean(1))


def test_branches_are_cut_one_after_the_other() -> None:
    """R10: each cut is crossed by one tower's value, and at most the mean of the other."""
    torch.manual_seed(0)
    model = InTurns()
    source = Source(model, partition=partition)
    captured = assert_same(model, batch_of(4), batch=4, source=source)
    assert captured.num_segments > 8
    assert max(captured.crossing_bytes) <= 2 * 4 * (6 + 1)
    assert source.capture(batch_of(4), training=False).num_segments == captured.num_segments


class OneOperation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class NoParameters(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.tanh(x) * 2, torch.sigmoid(y))


def test_a_model_without_values_to_send_is_one_segment() -> None:
    """R5: one operation, or no parameters: everything can be recomputed from the inputs."""
    one = Source(OneOperation(), partition=partition).capture({"x": torch.randn(4, 3)}, training=True)
    assert one.num_segments == 1
    none = Source(NoParameters(), partition=partition).capture(batch_of(4), training=True)
    assert none.num_segments == 1


def test_equal_layers_are_cut_at_equal_places() -> None:
    """R12: twice the layers, the same kinds of segments."""
    make, _, inputs = MODELS["gpt2"]
    model = make().train()
    config: Any = model.config
    kinds = []
    for layers in (6, 12):
        config.num_hidden_layers = layers
        source = Source(type(model)(config), partition=partition)
        captured = source.capture(inputs, training=True)
        kinds.append(max(find_kinds(source, captured)) + 1)
        assert kinds[-1] < captured.num_segments / 3
    assert kinds[1] <= kinds[0]


def test_evaluation_and_other_shapes_are_cut_like_training() -> None:
    """V18: the stages hold the same parameters without dropout and with longer sequences."""
    torch.manual_seed(0)
    make, _, inputs = MODELS["gpt2"]
    source = Source(make().train(), partition=partition)
    trained = source.capture(inputs, training=True)
    longer = {key: torch.cat([value, value], dim=1) for key, value in inputs.items()}
    one = {key: value[:1] for key, value in inputs.items()}
    for captured in (
        source.capture(inputs, training=False),
        source.capture(longer, training=True),
        source.capture(one, training=True),
    ):
        for ours, theirs in zip(captured.graph.segments, trained.graph.segments, strict=True):
            assert set(ours.parameters) <= set(theirs.parameters)


def test_the_first_capture_may_be_for_evaluation() -> None:
    make, _, inputs = MODELS["gpt2"]
    source = Source(make().train(), partition=partition)
    evaluated = source.capture(inputs, training=False)
    assert evaluated.num_segments == source.capture(inputs, training=True).num_segments > 8


class Turned(nn.Module):
    """Runs its layers in reverse order in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers if self.training else reversed(self.layers):
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def test_a_model_that_evaluates_in_another_order_is_refused_unless_one_stage_holds_it() -> None:
    source = Source(Turned(), partition=partition)
    source.capture(batch_of(4), training=True)
    evaluated = source.capture(batch_of(4), training=False)
    with pytest.raises(CaptureError, match=r"layers\.0\.weight.*another order than in training.*CutPoints"):
        [evaluated.carve(i, i + 1) for i in range(evaluated.num_segments)]
    assert evaluated.carve(0, evaluated.num_segments).state


class Later(nn.Module):
    """A layer in its middle that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, more: bool = False) -> Tensor:
        x = torch.tanh(self.first(x))
        return F.mse_loss(self.last(self.extra(x) if more else x), y)


def test_a_parameter_that_the_first_capture_did_not_use_is_refused_by_name() -> None:
    """R6: unless one stage holds the whole model."""
    source = Source(Later(), partition=partition)
    source.capture(batch_of(4), training=True)
    later = source.capture({**batch_of(4), "more": True}, training=True)
    with pytest.raises(CaptureError, match=r"extra\.weight, extra\.bias is used for the first time.*first"):
        [later.carve(i, i + 1) for i in range(later.num_segments)]
    assert later.carve(0, later.num_segments).state


def test_one_stage_runs_the_program_of_an_uncut_model() -> None:
    """Unused cuts cost nothing."""
    make, _, inputs = MODELS["gpt2"]
    programs = []
    for cut in (None, partition):
        captured = Source(make(), partition=cut).capture(inputs, training=True)
        programs.append(captured.carve(0, captured.num_segments).graph_module.code)
    assert programs[0] == programs[1]


def test_a_model_with_cutpoints_is_cut_only_there() -> None:
    model = make_model("Plain")
    inputs = make_inputs("Plain", 4, torch.Generator().manual_seed(0))
    assert any(isinstance(module, CutPoint) for module in model.modules())
    assert Source(model, partition=partition).capture(inputs, training=True).num_segments == 5


def test_the_cuts_are_deterministic() -> None:
    """R10: the same on every rank and every run."""
    inputs = make_inputs("GPT", 4, torch.Generator().manual_seed(0))
    sources = [Source(make_model("GPT", cutpoints=False), partition=partition) for _ in range(2)]
    assert len({source.capture(inputs, training=True).graph.fingerprint for source in sources}) == 1
