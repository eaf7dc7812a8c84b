"""Programs of any spans, run one after another, equal the model."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.comparison import assert_same, chained
from tests.capture.models import Everything, Mlp, batch_of, tokens
from varuna.capture import CutPoint, Source, cut_after, stage_state
from varuna.errors import CaptureError
from varuna.types import Work


def layouts(n: int) -> list[list[int]]:
    """All divisions of n segments into stages."""
    return [[0, *cuts, n] for depth in range(n) for cuts in itertools.combinations(range(1, n), depth)]


def test_a_model_with_cutpoints_runs_bit_identical() -> None:
    """V1"""
    model = Mlp()
    plain = copy.deepcopy(model)
    plain.cuts = nn.ModuleList(nn.Identity() for _ in plain.cuts)
    assert torch.equal(model(**batch_of(4)), plain(**batch_of(4)))
    x = torch.randn(3)
    assert CutPoint()(x) is x
    assert CutPoint()(x, None, x) == (x, None, x)


def test_every_layout_gives_the_plain_gradients() -> None:
    """V2"""
    captured = assert_same(Mlp(), batch_of(4), batch=4, layouts=layouts(4))
    assert captured.num_segments == 4


def test_any_value_may_cross_any_cut() -> None:
    """V3"""
    torch.manual_seed(0)
    assert_same(Everything(), tokens(4), batch=4, layouts=layouts(4))


def test_one_capture_serves_all_batch_sizes_but_one_sample() -> None:
    torch.manual_seed(0)
    source = Source(model := Everything())
    two = source.capture(tokens(2), training=True)
    assert source.capture(tokens(7), training=True) is two
    assert source.capture(tokens(1), training=True) is not two
    for size in (1, 2, 3, 7):
        assert_same(model, tokens(size), batch=size, source=source)


def test_an_impossible_span_is_refused_and_segments_hold_all_parameters() -> None:
    """V2"""
    captured = Source(Mlp()).capture(batch_of(2), training=True)
    for first, stop in ((0, 5), (2, 2), (-1, 2)):
        with pytest.raises(CaptureError, match=r"the model has 0\.\.3"):
            captured.carve(first, stop)
    parameters = [name for segment in captured.graph.segments for name in segment.parameters]
    assert sorted(parameters) == sorted(name for name, _ in Mlp().named_parameters())


def test_values_that_follow_from_the_inputs_are_recomputed_and_not_sent() -> None:
    """V3"""
    captured = Source(Everything()).capture(tokens(2), training=True)
    kinds = [[spec.needs_grad for spec in captured.carve(i, 4).received] for i in (1, 2, 3)]
    assert kinds == [
        [True] * 3,
        [True] * 3,
        [True] * 2,
    ]  # h, late, skip; late ends before the last cut; no mask
    assert "ids" in captured.carve(2, 3).inputs


def test_an_expensive_value_without_gradient_is_sent_one_way() -> None:
    """V3"""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.layer = nn.Linear(6, 6)
            self.cut = CutPoint()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            fixed = self.frozen(x).detach()
            h = self.cut(self.layer(x))
            return F.mse_loss(h * fixed, y)

    captured = assert_same(Frozen(), batch_of(3), batch=3)
    assert [(str(spec.dims[0]), spec.needs_grad) for spec in captured.carve(1, 2).received] == [
        ("b", False),
        ("b", True),
    ]


def test_a_view_of_a_weight_is_recomputed_where_it_is_used() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 6)
            self.cut = CutPoint()

        def forward(self, ids: Tensor) -> Tensor:
            out = self.embed.weight.t()
            h = self.cut(self.embed(ids))
            return F.cross_entropy((h @ out).flatten(0, 1), ids.flatten())

    inputs = {"ids": torch.randint(0, 7, (3, 4))}
    captured = assert_same(Tied(), inputs, batch=3)
    assert len(captured.carve(1, 2).received) == 1
    assert captured.carve(1, 2).state == ("embed.weight",)


def test_buffers_change_once_for_each_run_of_their_stage() -> None:
    """V17"""
    torch.manual_seed(0)
    source = Source(model := Everything())
    captured = source.capture(tokens(4), training=True)
    assert captured.momentum == {"norm.running_mean": 0.1, "norm.running_var": 0.1}
    program = captured.carve(1, 2)
    assert set(program.mutated) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    _, found = chained(source, captured, [0, 1, 2, 4], tokens(4))
    model(**tokens(4))
    for name, buffer in model.named_buffers():
        assert torch.equal(found[f"buffer {name}"], buffer), name


def test_evaluation_is_captured_separately_and_updates_no_statistics() -> None:
    torch.manual_seed(0)
    source = Source(model := Everything(dropout=0.5))
    captured = source.capture(tokens(4), training=False)
    assert not captured.random
    program = captured.carve(0, 4)
    assert program.mutated == ("seen",)  # the model itself counts its calls, in eval mode too
    state = stage_state(source, captured, 0, 4, device="cpu")
    (loss,) = program([state.tensor(name) for name in program.state], (), tokens(4), Work(0, 0, 0))
    torch.testing.assert_close(loss, model.eval()(**tokens(4))["loss"])


def test_cut_after_cuts_a_model_that_is_not_edited() -> None:
    """V1"""
    model = nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))})

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model["body"]

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            h = self.body(x)
            return F.mse_loss(h, y), h

    plain = Plain()
    names = list(plain.state_dict())
    assert cut_after(plain, "body.*") == ["body.0", "body.1", "body.2"]
    assert cut_after(plain, "body.1") == ["body.1"]
    assert list(plain.state_dict()) == names
    assert assert_same(plain, batch_of(3), batch=3).num_segments == 4
    with pytest.raises(CaptureError, match=r"similar names: .*body\.0"):
        cut_after(plain, "boddy.*")


def test_inputs_may_be_shared_by_all_samples_or_have_their_batch_elsewhere() -> None:
    """V12"""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.cut = CutPoint()

        def forward(self, x: Tensor, bias: Tensor, table: Tensor, turned: Tensor) -> Tensor:
            h = self.cut(self.layer(x) + bias)
            return (h @ table + turned.t()).square().mean()

    inputs = {
        "x": torch.randn(4, 6),
        "bias": torch.randn(1, 6),
        "table": torch.randn(6, 6),
        "turned": torch.randn(6, 4),
    }
    model = Shared()
    assert_same(model, inputs, batch=4, source=Source(model, batch_dims={"table": None, "turned": 1}))
    with pytest.raises(CaptureError, match=r"'table' has 6 along dimension 0, but the batch is 4"):
        Source(model).capture(inputs, training=True)


def test_two_inputs_that_are_one_tensor_in_the_example_stay_separate() -> None:
    ids = torch.randint(0, 11, (3, 5))
    source = Source(model := Everything())
    source.capture({"ids": ids, "labels": ids, "scale": 0.5, "nothing": None}, training=True)
    other = {"ids": ids, "labels": (ids + 1) % 11, "scale": 0.5, "nothing": None}
    assert_same(model, other, batch=3, source=source)


def test_the_users_model_is_neither_changed_nor_kept() -> None:
    """V5"""
    import gc
    import weakref

    model = Everything()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    source = Source(model)
    captured = source.capture(tokens(2), training=True)
    state = stage_state(source, captured, 0, 4, device="cpu")
    theirs = {value.data_ptr() for value in model.state_dict().values()}
    assert not theirs & {value.data_ptr() for value in state.state_dict().values()}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    weight = weakref.ref(model.embed.weight)
    del model, theirs
    gc.collect()
    assert weight() is None
    source.capture(tokens(1), training=False)
