"""The fused loss over a large vocabulary equals the model's plain loss."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from varuna.capture import Source, SpanProgram
from varuna.capture.graph import fused_loss as loss
from varuna.capture.graph.fused_loss import fuse_losses, fused_cross_entropy, row_blocks, with_fused_loss
from varuna.execute.step.split import backward_inputs, backward_weights
from varuna.types import PrecisionName, Work

WORDS, WIDTH, TOKENS = 4099, 8, 6


class Language(nn.Module):
    def __init__(self, finish: Callable[[Tensor, Tensor], Tensor], *, bias: bool, words: int = WORDS) -> None:
        super().__init__()
        self.words, self.head, self.finish = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words, bias), finish

    def forward(self, tokens: Tensor) -> Tensor:
        labels = tokens.where(tokens % 5 != 0, -100)
        return self.finish(self.head(self.words(tokens).tanh()), labels)


def as_hugging_face(scores: Tensor, labels: Tensor) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(scores.float().view(-1, scores.shape[-1]), shifted.view(-1))


def of_all_but_the_last(scores: Tensor, labels: Tensor) -> Tensor:
    before = scores[:, :-1].contiguous()
    return F.cross_entropy(before.view(-1, WORDS), labels[:, 1:].reshape(-1), reduction="sum")


def smoothed(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.view(-1, WORDS), labels.view(-1), label_smoothing=0.1)


def used_twice(scores: Tensor, labels: Tensor) -> Tensor:
    return as_hugging_face(scores, labels) + scores.mean()


def captured(model: nn.Module, precision: PrecisionName = "fp32") -> tuple[SpanProgram, dict[str, Tensor]]:
    inputs = {"tokens": torch.randint(9, (3, TOKENS))}
    return Source(model, precision=precision).capture(inputs, training=True).carve(0, 1), inputs


def run(model: nn.Module, program: SpanProgram, inputs: Any) -> list[Tensor]:
    """The loss, and the gradients of twice the loss."""
    state = dict(model.named_parameters())
    (found,) = program([state[name] for name in program.state], [], inputs, Work(0, 0, 0))
    return [found.detach(), *torch.autograd.grad(2 * found, [state[name] for name in program.state])]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("finish", [as_hugging_face, of_all_but_the_last])
def test_the_fused_loss_has_the_value_and_gradients_of_the_plain_one(
    finish: Any, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V10, V21: in uneven blocks, with ignored labels."""
    monkeypatch.setattr(loss, "BLOCK_BYTES", 5 * 4160 * 8)
    model = Language(finish, bias=bias)
    if finish is of_all_but_the_last:
        model = model.double()
    program, inputs = captured(model)
    joint = fuse_losses(program)
    assert joint is not program
    torch.testing.assert_close(run(model, joint, inputs), run(model, program, inputs))
    with torch.no_grad():
        state = dict(model.named_parameters())
        (found,) = joint([state[name] for name in joint.state], [], inputs, Work(0, 0, 0))
    torch.testing.assert_close(found, run(model, joint, inputs)[0])


def test_in_bf16_it_is_as_accurate_as_the_plain_loss() -> None:
    """V14: up to rounding."""
    model = Language(as_hugging_face, bias=True)
    program, inputs = captured(model, "bf16")
    exact = run(model, captured(model)[0], inputs)
    for plain, joint, right in zip(
        run(model, program, inputs), run(model, fuse_losses(program), inputs), exact, strict=True
    ):
        assert (joint - right).norm() <= 1.5 * (plain - right).norm() + 1e-4 * right.norm()


def outside_autocast(scores: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return as_hugging_face(scores, labels)


def rounded_outside_autocast(scores: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return of_all_but_the_last(scores, labels)


def test_a_loss_outside_autocast_is_fused_with_scores_inside() -> None:
    """V14: the scores are in bf16. A loss in bf16 would have other values."""
    inside, outside = (Language(finish, bias=True) for finish in (as_hugging_face, outside_autocast))
    outside.load_state_dict(inside.state_dict())
    program, inputs = captured(outside, "bf16")
    joint = fuse_losses(program)
    assert joint is not program
    torch.testing.assert_close(
        run(outside, joint, inputs), run(inside, fuse_losses(captured(inside, "bf16")[0]), inputs)
    )
    program, _ = captured(Language(rounded_outside_autocast, bias=True), "bf16")
    assert fuse_losses(program) is program


def test_its_backward_can_be_split() -> None:
    """V21: a zero-bubble schedule sends the inputs' gradients first."""
    x, inner = torch.rand(3, WIDTH, requires_grad=True), torch.rand(WIDTH, WIDTH, requires_grad=True)
    weight, labels = torch.rand(WORDS, WIDTH, requires_grad=True), torch.tensor([1, -100, 7])
    hidden = (x @ inner).tanh()
    found = fused_cross_entropy(hidden, weight, None, labels, -100, True)
    (of_x,), pending = backward_inputs([get_gradient_edge(1 * found)], [torch.tensor(2.0)], [x])
    del found, hidden
    assert inner.grad is None  # that of the words was there with the loss
    backward_weights(pending)
    plain = 2 * F.cross_entropy((x @ inner).tanh() @ weight.t(), labels)
    torch.testing.assert_close(
        [of_x, inner.grad, weight.grad], list(torch.autograd.grad(plain, [x, inner, weight]))
    )


def test_a_loss_of_unknown_shape_is_not_fused() -> None:
    program, _ = captured(Language(as_hugging_face, bias=True))
    for node in program.graph_module.graph.nodes:
        node.meta.pop("val", None)
    assert fuse_losses(program) is program


def test_other_losses_are_not_fused() -> None:
    models = [
        Language(smoothed, bias=True),
        Language(used_twice, bias=True),
        Language(as_hugging_face, bias=True).double(),  # whose scores the model rounds itself
        Language(as_hugging_face, bias=True, words=9),
    ]
    for model in models:
        program, _ = captured(model)
        assert fuse_losses(program) is program


def test_the_cpu_keeps_the_plain_loss() -> None:
    program, _ = captured(Language(as_hugging_face, bias=True))
    assert with_fused_loss(program) is program


def test_a_batch_of_ignored_labels_gives_nan_like_torch() -> None:
    hidden, weight = torch.rand(2, WIDTH, requires_grad=True), torch.rand(WORDS, WIDTH)
    found = fused_cross_entropy(hidden, weight, None, torch.tensor([-100, -100]), -100, True)
    assert found.isnan() and F.cross_entropy(hidden @ weight.t(), torch.tensor([-100, -100])).isnan()


@given(st.integers(0, 5000), st.integers(1, 1 << 30))
def test_blocks_cover_all_rows_and_fit(count: int, row_bytes: int) -> None:
    found = row_blocks(count, row_bytes)
    assert [row for first, stop in found for row in range(first, stop)] == list(range(count))
    assert all(
        stop - first == 1 or (stop - first - 1) * row_bytes < loss.BLOCK_BYTES for first, stop in found
    )
