"""Facts of a model that need no measurement, counted by hand; and batches that are checked."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import CutPoint
from varuna.capture import Source
from varuna.measure.draft import ProfileSubject
from varuna.measure.optimizer import WeightShape
from varuna.profile.description import ProfileBatches, _cut_cost, describe, trained_shapes
from varuna.profile.runnable import SegmentFactory
from varuna.types import CutCost, Dim, TensorSpec, TieCost

WIDTH, CLASSES = 8, 5
CPU = torch.device("cpu")


class Tied(nn.Module):
    """An embedding used again as the head, two equal layers, a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        x = self.cuts[0](self.words(ids))
        x = self.cuts[1](torch.relu(self.layers[0](x)))
        x = self.cuts[2](torch.relu(self.layers[1](x)))
        scores = F.linear(self.frozen(x) * self.scale, self.words.weight)
        return F.cross_entropy(scores, label)


def get_batch(size: int) -> dict[str, Tensor]:
    return {"ids": torch.zeros(size, dtype=torch.long), "label": torch.zeros(size, dtype=torch.long)}


def described(precision: str = "fp32") -> tuple[Source, Any, ProfileSubject]:
    source = Source(Tied(), precision=precision)  # type: ignore[arg-type]
    batches = ProfileBatches(get_batch, source)
    captured = source.capture(batches.sample, training=True)
    subject = describe(source, captured, sample_bytes=batches.sample_bytes, device=CPU, devices_per_machine=4)
    return source, captured, subject


def test_equal_segments_are_one_kind() -> None:
    assert described()[2].segments == (0, 1, 1, 2)


def test_bytes_of_each_kind_are_those_of_a_stage_of_its_own() -> None:
    first, middle, last = described()[2].kinds
    words, layer = CLASSES * WIDTH, WIDTH * WIDTH + WIDTH
    assert (first.parameter_bytes, first.gradient_bytes, first.num_trained) == (4 * words, 4 * words, words)
    assert (middle.parameter_bytes, middle.gradient_bytes, middle.num_trained) == (
        4 * layer,
        4 * layer,
        layer,
    )
    # The tied weight, the frozen weight and the buffer; only the first is trained.
    assert last.parameter_bytes == 4 * (words + WIDTH * WIDTH + WIDTH)
    assert (last.gradient_bytes, last.num_trained) == (4 * words, words)


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_bytes_over_a_cut_follow_the_batch_and_the_precision(precision: str, itemsize: int) -> None:
    *others, last = described(precision)[2].cuts
    assert last == CutCost(Dim(itemsize * WIDTH, 0), Dim(itemsize * WIDTH, 0))
    assert len(others) == 2 and all(cut.sent.fixed == 0 for cut in others)


def test_a_tie_is_counted_with_the_segments_that_share_it() -> None:
    assert described()[2].ties == (TieCost((0, 3), 4 * CLASSES * WIDTH, CLASSES * WIDTH),)


def test_each_trained_weight_is_listed_once_in_the_order_of_the_segments() -> None:
    source, captured, _ = described()
    layer = [WeightShape((WIDTH, WIDTH), torch.float32), WeightShape((WIDTH,), torch.float32)]
    assert sorted(trained_shapes(source, captured), key=str) == sorted(
        [WeightShape((CLASSES, WIDTH), torch.float32), *layer, *layer], key=str
    )
    assert trained_shapes(source, captured)[0] == WeightShape((CLASSES, WIDTH), torch.float32)


def test_the_inputs_of_a_sample_are_counted() -> None:
    assert described()[2].sample_bytes == 2 * 8


def test_ranks_share_the_memory_of_a_processor() -> None:
    source, captured, shared = described()
    alone = describe(source, captured, sample_bytes=1, device=CPU, devices_per_machine=1)
    assert shared.device_memory_bytes == alone.device_memory_bytes // 4
    assert shared.fingerprint == alone.fingerprint == captured.graph.fingerprint


def test_a_cut_with_a_size_that_depends_on_values_is_refused() -> None:
    selected = TensorSpec("selected", "float32", (None,), needs_grad=True)
    with pytest.raises(ValueError, match=r"the cut after segment 3, depends on its values.*move the Cut"):
        _cut_cost([selected], 3)


# ---------------------------------------------------------------- batches


def batches(get: Any) -> ProfileBatches:
    return ProfileBatches(get, Source(Tied()))


def test_get_batch_is_called_for_the_processor_if_it_takes_a_device() -> None:
    devices: list[str] = []

    def with_device(size: int, device: str) -> dict[str, Tensor]:
        devices.append(device)
        return get_batch(size)

    inputs, batch = batches(with_device).of(3)
    assert devices == ["cpu", "cpu"] and len(inputs["ids"]) == 3  # type: ignore[arg-type]
    assert (batch.size, dict(batch.dims)) == (3, {"ids": 0, "label": 0})


@pytest.mark.parametrize(
    ("get", "error", "message"),
    [
        (
            lambda size: get_batch(size + 1),
            ValueError,
            r"returned 3 in 'ids', 3 in 'label'",
        ),
        (lambda size: list(get_batch(size).values()), TypeError, r"must return a dict .*, not list"),
    ],
)
def test_a_wrong_batch_is_refused(get: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        batches(get)


def test_a_batch_of_the_wrong_size_is_refused_when_it_comes() -> None:
    limited = batches(lambda size: get_batch(min(size, 4)))
    assert limited.of(4)[1].size == 4
    with pytest.raises(ValueError, match=r"get_batch\(8\) must return 8 samples, but returned 4 in 'ids'"):
        limited.of(8)


def test_frozen_segments_at_the_start_get_no_gradients() -> None:
    """TRA-2: only cuts behind a trained parameter return gradients; only these segments have a backward."""
    model = Tied()
    model.words.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    source = Source(model)
    batches = ProfileBatches(get_batch, source)
    captured = source.capture(batches.sample, training=True)
    subject = describe(source, captured, sample_bytes=batches.sample_bytes, device=CPU, devices_per_machine=4)
    assert [cut.returned.size(1) for cut in subject.cuts] == [0, 0, 4 * WIDTH]
    assert subject.segments == (0, 1, 2, 3)
    assert [kind.gradient_bytes for kind in subject.kinds] == [0, 0, 4 * (WIDTH * WIDTH + WIDTH), 0]
    factory = SegmentFactory(source, subject.segments, device=CPU)
    segments = [factory.make(kind, captured, batches.sample) for kind in range(4)]
    values: list[list[Tensor]] = [[]]
    for segment in segments:
        values.append(segment.forward(values[-1]))
    assert [segment.wanted for segment in segments] == [[False], [False], [True], [True]]
    given = [[torch.ones_like(made[0])] for made in values[1:]]
    returned = [segment.backward(gradients) for segment, gradients in zip(segments, given, strict=True)]
    assert [len(gradients) for gradients in returned] == [0, 0, 0, 1]
