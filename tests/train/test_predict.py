"""`predict`: the outputs of a wrapped model for each sample, against the plain model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.tasks import stage_map
from varuna import CutPoint, Varuna


class Classifier(nn.Module):
    """Returns a loss if it gets labels, and scores and hidden values for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        hidden = []
        for number, layer in enumerate(self.layers):
            x = torch.tanh(self.dropout(layer(x)))
            hidden.append(x)
            x = self.cuts[number](x) if number < 3 else self.norm(x)
        found = {"scores": x, "hidden": (hidden[0], {"last": hidden[-1].transpose(0, 1)})}
        if labels is None:
            return found
        return {"loss": nn.functional.cross_entropy(x, labels), **found}


def made() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().double()


def inputs_of(count: int, *, labels: bool = True) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(count, 6, generator=draw, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(6, (count,), generator=draw)} if labels else {"x": x}


def wrapped(depth: int, width: int) -> Varuna:
    model = Varuna(
        made(), stage_map(depth, width), inputs_of(4), 12, 2, device="cpu", from_cache=False, loss="loss"
    )
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def predict(depth: int, width: int) -> list[Any]:
    model = wrapped(depth, width)
    share = 12 // width
    first = model.rank_within_stage * share
    part = {name: value[first : first + share] for name, value in inputs_of(12).items()}
    found = [model.predict(inputs_of(count, labels=count != 5)) for count in (12, 7, 5, 2)]
    model.step(part)
    model.optimizer.step()
    model.zero_grad()
    found.append(model.predict(inputs_of(7)))
    found.append((model.full_state_dict(), model.evaluate(part)))
    model.close()
    return found


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)])
def test_outputs_of_each_sample_equal_the_plain_model(pool: Pool, depth: int, width: int) -> None:
    """V18: on every rank, in order, for any number of samples; between steps."""
    for found in pool.run(predict, depth * width, depth, width):
        *predictions, (state, loss) = found
        plain = made().eval()
        with torch.no_grad():
            expected = [plain(**inputs_of(count, labels=count != 5)) for count in (12, 7, 5, 2)]
            plain.load_state_dict(state)
            expected.append(plain(**inputs_of(7)))
            assert loss == pytest.approx(float(plain(**inputs_of(12))["loss"]), rel=1e-10)
        torch.testing.assert_close(predictions, expected, rtol=1e-10, atol=1e-12)


def predict_shares() -> str:
    model = wrapped(1, 2)
    try:
        model.predict({name: value[model.rank_within_stage :: 2] for name, value in inputs_of(8).items()})
    except ValueError as error:
        return str(error)
    finally:
        model.close()
    return ""


def test_different_inputs_are_refused(pool: Pool) -> None:
    """V7: each replica passed its share, as for `evaluate`."""
    for message in pool.run(predict_shares, 2):
        assert message.startswith("predict was called with other inputs on rank 1 than on rank 0: pass the")
