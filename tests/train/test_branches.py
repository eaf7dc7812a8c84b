"""Models with checks, causal masks, and losses among other outputs train as in one process."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.tasks import SEED
from tests.train.faces import FACES, batch_of, check_state, play
from varuna import Varuna
from varuna.errors import CaptureError


class Careful(nn.Module):
    """Checks its inputs and values, and takes another path for large batches, which computes the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x is not None and x.max() > 100:
            raise ValueError("x must not exceed 100")
        assert torch.isfinite(x).all()
        h = self.first(x)
        if h.shape[0] >= 8:
            h = h.contiguous()
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        h = self.encoder(h.view(-1, 4, 2), mask=mask).flatten(1)
        if self.training and not torch.isfinite(h).all():
            h = h.clamp(-1e30, 1e30)
        return self.last(h).square().mean()


def three_steps(_model: Any, optimizer: torch.optim.Optimizer, run: Any) -> list[float]:
    losses = []
    for step in range(3):
        losses.append(run(step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("face", FACES)
def test_a_model_that_checks_its_values_trains_as_in_one_process(pool: Pool, face: str) -> None:
    """EXA-9: over two stages."""
    _, expected = play("plain", 1, 1, Careful, three_steps)
    for _, state in pool.run(play, 2, face, 2, 1, Careful, three_steps):
        check_state(state, expected)


@dataclass
class Result:
    logits: Tensor
    parts: dict[str, Tensor]
    objective: Tensor


class Scored(nn.Module):
    """Returns logits, then the loss."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        logits = self.last(torch.tanh(self.first(x)))
        loss, other = logits.square().mean(), logits.abs().mean()
        return {
            "logits, loss": (logits, loss),
            "one element": loss.view(1),
            "dataclass": Result(logits, {"other": other}, loss),
            "index": (logits, other, loss),
            "key": {"logits": logits, "first": other, "second": loss},
            "function": {"half": loss / 2, "rest": loss / 2},
        }[self.form]


FORMS = {
    "logits, loss": None,
    "one element": None,
    "dataclass": None,
    "index": 2,
    "key": "second",
    "function": lambda out: sum(out.values()),
}


def train_scored(form: str) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float64)
    model = Varuna(
        Scored(form), "0;1", {"x": batch_of(0)[:2]}, 8, 2, device="cpu", timeout_seconds=30, loss=FORMS[form]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer)
    loss, _ = model.step({"x": batch_of(0)})
    optimizer.step()
    state = {name: value.detach().clone() for name, value in model.full_state_dict().items()}
    model.close()
    torch.set_default_dtype(torch.float32)
    return float(loss), state


def test_the_loss_may_be_any_output(pool: Pool) -> None:
    """EXA-9: found where only one output can be it, else chosen with `loss=`."""
    results = [pool.run(train_scored, 2, form)[0] for form in FORMS]
    for form, (loss, state) in zip(FORMS, results, strict=True):
        assert loss == pytest.approx(results[0][0], rel=1e-12), form
        check_state(state, results[0][1], form)


def wrap_alone(form: str, loss: Any = None) -> str:
    try:
        Varuna(Scored(form), "0;", {"x": torch.randn(2, 6)}, 2, 1, device="cpu", loss=loss)
    except CaptureError as error:
        return str(error)
    return "wrapped"


def test_an_ambiguous_or_missing_loss_names_the_choices(pool: Pool) -> None:
    """EXA-9"""
    assert "Choose one with loss=1 or loss=2" in pool.run(wrap_alone, 1, "index")[0]
    assert "Choose one with loss='first' or loss='second'" in pool.run(wrap_alone, 1, "key")[0]
    assert "has no loss='third' (KeyError)" in pool.run(wrap_alone, 1, "key", "third")[0]
    assert "loss=0 chooses a tensor of shape" in pool.run(wrap_alone, 1, "index", 0)[0]


def call_nested(depth: int) -> Any:
    from pyrannc import RaNNCModule

    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float64)
    model = Scored("dataclass")
    wrapped = RaNNCModule(model, device="cpu", partition_num=depth, pipeline_num=2, timeout_seconds=30)
    out = wrapped(batch_of(0).chunk(2)[torch.distributed.get_rank()])
    (out.objective + out.parts["other"]).backward()
    gradient = wrapped.get_param_grad("first.weight")
    wrapped.undeploy()
    torch.set_default_dtype(torch.float32)
    return type(out).__name__, out.logits.shape, gradient


def test_a_dataclass_is_an_output_like_any_other(pool: Pool) -> None:
    """EXA-9: in pyrannc, with the gradients of one process."""
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float64)
    plain = Scored("dataclass")
    out = plain(batch_of(0))
    (out.objective + out.parts["other"]).backward()
    torch.set_default_dtype(torch.float32)
    for name, shape, gradient in pool.run(call_nested, 2, 2):
        assert (name, tuple(shape)) == ("Result", (4, 3))
        torch.testing.assert_close(gradient, plain.first.weight.grad, rtol=1e-9, atol=1e-12)
