"""Memory accounting: each storage counts once, as long as something refers to it."""

import torch
from torch import Tensor

from varuna.measure.memory import CountingMeter, SegmentBytes, count_bytes, meter_for

CPU = torch.device("cpu")
KB = 256  # float32 elements in a KiB


def test_memory_counts_while_something_refers_to_it() -> None:
    meter = CountingMeter(CPU)
    with meter.counting():
        first = torch.zeros(2 * KB) + 1
        assert meter.now() == 2048 + 2048 or meter.now() == 2048  # the zeros may be freed already
        second = first * 2
        assert meter.now() == 2 * 2048
        del first
        assert meter.now() == 2048
        del second
        assert meter.now() == 0


def test_views_and_in_place_operations_add_nothing() -> None:
    meter = CountingMeter(CPU)
    with meter.counting():
        base = torch.ones(4, KB) * 3
        views = [base.t(), base.view(-1), base[1:], base.add_(1)]
        assert meter.now() == base.nbytes == 4096
        del base
        assert meter.now() == 4096, "a view keeps the whole storage"
        del views
        assert meter.now() == 0


def test_the_peak_is_the_most_since_the_last_restart() -> None:
    meter = CountingMeter(CPU)
    with meter.counting():
        held = torch.ones(KB) * 2
        large = torch.ones(8 * KB) * 2
        del large
        assert meter.peak() >= 1024 + 8192 and meter.now() == 1024
        meter.restart()
        assert meter.peak() == 1024
        small = held * 3
        del small
        assert meter.peak() == 2048


def test_what_existed_before_is_not_counted() -> None:
    before = torch.ones(16 * KB)
    meter = CountingMeter(CPU)
    with meter.counting():
        before.mul_(2)
        assert meter.now() == 0
        copy = before.clone()
        assert meter.now() == copy.nbytes


def test_a_backward_is_seen_below_autograd() -> None:
    weight = torch.ones(KB, requires_grad=True)
    meter = CountingMeter(CPU)
    with meter.counting():
        torch.autograd.backward((weight * 2).sum())
        assert weight.grad is not None and meter.now() == weight.grad.nbytes


def test_outside_cuda_tensors_are_counted() -> None:
    assert isinstance(meter_for(CPU), CountingMeter)


class SquareSegment:
    """Keeps the square of its input, behind two views, until its backward."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def forward(self, given: list[Tensor], *, keep_graph: bool = True) -> list[Tensor]:
        square = given[0] * given[0]
        self.kept = [given[0], square.view(-1), square.t()]
        return [square + 1.0]

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        large = torch.cat([gradients[0]] * 10)
        self.kept = []
        return [large[:1]]

    backward_inputs = backward

    def backward_weights(self) -> None:
        pass


def test_views_of_a_segment_count_once() -> None:
    given = torch.ones(8, 8)
    found = count_bytes(SquareSegment(), [given], [given], [False], CountingMeter(CPU))
    # Held: the input and its square. Working: the gradient that arrived, and ten copies of it.
    assert found == SegmentBytes(activation=2 * given.nbytes, working=11 * given.nbytes, split=0)


class SplitSegment(SquareSegment):
    """Keeps the gradient of its output between the two parts of its backward, and its output."""

    def forward(self, given: list[Tensor], *, keep_graph: bool = True) -> list[Tensor]:
        output = given[0] + 1.0
        self.kept = [given[0], output]
        return [output]

    def backward_inputs(self, gradients: list[Tensor]) -> list[Tensor]:
        self.kept = [*self.kept, torch.cat([gradients[0], gradients[0]])]
        return []

    def backward_weights(self) -> None:
        self.kept = []


def test_a_kept_output_is_counted_by_the_next_segment_and_split_bytes_are_what_waits() -> None:
    given = torch.ones(8, 8)
    found = count_bytes(SplitSegment(), [given], [given], [False], CountingMeter(CPU))
    assert found.activation == given.nbytes  # the input; its output is the next segment's input
    assert found.split == 2 * given.nbytes


def test_a_relayed_input_is_not_counted_again() -> None:
    given = torch.ones(8, 8)
    alone = count_bytes(SquareSegment(), [given], [given], [False], CountingMeter(CPU))
    relayed = count_bytes(SquareSegment(), [given], [given], [True], CountingMeter(CPU))
    assert alone.activation - relayed.activation == given.nbytes
