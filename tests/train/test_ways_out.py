"""Every way out that a refusal of a wrapper offers works, in both interfaces."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.ways_out import Way, follow, site_of
from varuna import CutPoint, Varuna
from varuna.errors import CaptureError

BATCH = 6


def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(BATCH, 6, generator=generator) for name in ("x", "y")}


class Net(nn.Module):
    """Two layers, a loss and outputs of several kinds."""

    def __init__(self, kind: str = "loss") -> None:
        super().__init__()
        self.first, self.cut, self.last, self.kind = nn.Linear(6, 6), CutPoint(), nn.Linear(6, 6), kind
        self.other, self.which = nn.Linear(6, 6), "last"

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        if self.kind == "doubles":  # over the cut, two rows of a sample are not together
            one, other = self.cut(torch.cat([h, -h], 0)).chunk(2, 0)
            return F.mse_loss(self.last(one) - other, y)
        h = self.cut(h)
        h = (self.last if self.which == "last" else self.other)(h)
        loss = F.mse_loss(h, y)
        outputs: dict[str, Any] = {
            "loss": loss,
            "root": loss.sqrt(),
            "detached": loss.detach(),
            "halves": {"loss": loss, "h": torch.cat([h, -h], 0)},
            "stacked": {"loss": loss, "h": torch.stack([h, -h], 1)},
            "padded": {"loss": loss, "h": torch.cat([h, torch.zeros(1, 6)], 0)},
            "count": {"loss": loss, "h": (h > 0).sum()},
            "counts": {"loss": loss, "h": (h > 0).sum(1)},
        }
        return outputs[self.kind]


def wrapped(kind: str, *, chunk: int = 2, **options: Any) -> Varuna:
    model = Net(kind)
    found = Varuna(model, "0;", inputs(), BATCH, chunk, device="cpu", timeout_seconds=30, **options)
    found.kept = model  # type: ignore[assignment]
    return found


def steps(kind: str, **options: Any) -> None:
    """Train one step, and compare it with one plain process."""
    torch.manual_seed(0)
    model = wrapped(kind, **options)
    torch.manual_seed(0)
    plain = Net(kind)
    expected = plain(**inputs())
    expected = expected["loss"] if isinstance(expected, dict) else expected
    expected.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer)
    loss, _ = model.step(inputs())
    optimizer.step()
    if "loss_weight" not in options:
        torch.testing.assert_close(loss, float(expected.detach()))
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        torch.testing.assert_close(model.full_state_dict()["first.weight"], plain.first.weight.detach())
    model.close()


def predicts(kind: str, **options: Any) -> None:
    model = wrapped(kind, **options)
    found = model.predict(inputs())
    torch.testing.assert_close(found["h"], Net.forward(model.gather_model(), **inputs())["h"].detach())  # type: ignore[arg-type]
    model.close()


def switches(*, again: bool) -> None:
    """Use another layer after the model was wrapped, or wrap the model again."""
    model = wrapped("loss")
    model.kept.which = "other"  # type: ignore[union-attr, assignment]
    if again:
        model.close()
        model = Varuna(model.kept, "0;", inputs(), BATCH, 2, device="cpu", timeout_seconds=30)  # type: ignore[arg-type]
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.step(inputs())
    model.close()


def evaluates_other(*, gathers: bool) -> None:
    """Evaluate with a layer that this stage does not hold: on rank 1 of two stages."""
    original = Net("loss")
    model = Varuna(original, "0;1;", inputs(), BATCH, 2, device="cpu", timeout_seconds=30)
    original.which = "other"
    try:
        if gathers:
            whole = model.gather_model()
            if whole is not None:
                whole.which = "other"  # type: ignore[assignment]
                assert whole(**inputs()).isfinite()
        else:
            model.evaluate(inputs())
    finally:
        model.close()


def calls(kind: str, given: dict[str, Any] | None = None, **options: Any) -> Any:
    """Call a RaNNCModule on one rank, with two micro-batches."""
    model = RaNNCModule(Net(kind), device="cpu", pipeline_num=2, timeout_seconds=30, **options)
    try:
        found = model(**(given or inputs()))
        (found["loss"] if isinstance(found, dict) else found).backward()
        return found
    finally:
        model.undeploy()


def uneven(mapping: str) -> None:
    model = Varuna(Net("doubles"), mapping, inputs(), BATCH, 2, device="cpu", timeout_seconds=30)
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.step({name: value.chunk(model.data_depth)[0] for name, value in inputs().items()})
    model.close()


def replicas(replica_num: tuple[int, ...]) -> None:
    model = RaNNCModule(
        Net("doubles"), device="cpu", pipeline_num=2, timeout_seconds=30, replica_num=replica_num
    )
    try:
        model(**inputs()).backward()
    finally:
        model.undeploy()


def x_and(**others: Any) -> dict[str, Any]:
    return {**inputs(), **others}


VALIDATE, CALLS = "varuna/train/validate.py refuse_", "pyrannc/calls.py "
WAYS: dict[str, tuple[int, Way]] = {
    "detached": (
        1,
        Way(f"{VALIDATE}detached", lambda: steps("detached"), "is the loss detached", lambda: steps("loss")),
    ),
    "root": (
        1,
        Way(
            f"{VALIDATE}coupled_losses",
            lambda: steps("root"),
            "use one micro-batch and one replica (chunk_size = batch_size)",
            lambda: steps("root", chunk=BATCH),
        ),
    ),
    "root, weighed": (
        1,
        Way(
            f"{VALIDATE}coupled_losses",
            lambda: steps("root"),
            "loss_weight=lambda batch: len(batch[name])",
            lambda: steps("root", loss_weight=lambda batch: len(batch["x"])),
        ),
    ),
    "uneven": (
        3,
        Way(
            f"{VALIDATE}inseparable",
            lambda: uneven("0,1;2;"),
            "use the same number of replicas for all stages",
            lambda: uneven("0,1,2;"),
        ),
    ),
    "other weights": (
        1,
        Way(
            "varuna/train/programs.py refuse_other_weights",
            lambda: switches(again=False),
            "or wrap it again",
            lambda: switches(again=True),
        ),
    ),
    "missing weights": (
        2,
        Way(
            "varuna/train/programs.py refuse_missing_weights",
            lambda: evaluates_other(gathers=False),
            "gather_model() returns a model that has all of them",
            lambda: evaluates_other(gathers=True),
        ),
    ),
    "halves": (
        1,
        Way(
            "varuna/train/outputs.py _refuse_disorder",
            lambda: predicts("halves"),
            "give each sample its own rows",
            lambda: predicts("stacked"),
        ),
    ),
    "padded": (
        1,
        Way(
            "varuna/execute/step/outputs.py classify_output",
            lambda: predicts("padded", chunk=BATCH),
            "expected one dimension that is the batch",
            lambda: predicts("stacked"),
        ),
    ),
    "count": (
        1,
        Way(
            "varuna/execute/step/outputs.py ModelOutput._single_value",
            lambda: predicts("count"),
            "return one value for each sample",
            lambda: predicts("counts"),
        ),
    ),
    "halves, pyrannc": (
        1,
        Way(
            "pyrannc/pipeline.py Pipeline._refuse_disorder",
            lambda: calls("halves"),
            "torch.stack([a, b], 1)",
            lambda: calls("stacked"),
        ),
    ),
    "no such dimension": (
        1,
        Way(
            f"{CALLS}describe_call",
            lambda: calls("loss", batch_dims={"x": 4}),
            "name one of its dimensions",
            lambda: calls("loss", batch_dims={"x": 0}),
        ),
    ),
    "no batch": (
        1,
        Way(
            f"{CALLS}agree_on_call",
            lambda: calls("loss", batch_dims={"x": None, "y": None}),
            "pass a tensor whose leading dimension is the batch",
            lambda: calls("loss"),
        ),
    ),
    "other batch": (
        1,
        Way(
            f"{CALLS}agree_on_call 2",
            lambda: calls("loss", x_and(y=torch.ones(3, 6))),
            "expected the same number, or 1",
            lambda: calls("loss", x_and(y=torch.ones(1, 6))),
        ),
    ),
    "shared input with gradient": (
        1,
        Way(
            f"{CALLS}agree_on_call 3",
            lambda: calls("loss", x_and(y=torch.ones(1, 6, requires_grad=True))),
            "give it a batch dimension",
            lambda: calls("loss", x_and(y=torch.ones(BATCH, 6, requires_grad=True))),
        ),
    ),
    "uneven, pyrannc": (
        3,
        Way(
            "pyrannc/layouts.py balanced_spans",
            lambda: replicas((2, 1)),
            "give all stages equally many replicas",
            lambda: replicas((3,)),
        ),
    ),
}
INTERNAL = {"varuna/train/gather.py gather_model": "the first stage holds what no stage uses"}


def follow_alone() -> list[str]:
    """Follow each way of one rank; return the failures."""
    failures = []
    for name, (ranks, way) in WAYS.items():
        if ranks == 1:
            try:
                follow(way)
            except (Exception, pytest.fail.Exception) as error:
                failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


def refused_at(name: str) -> str:
    """Return where this rank is refused; other ranks may learn of it by another error."""
    _, way = WAYS[name]
    try:
        way.refused()
    except CaptureError as error:
        return site_of(error) if way.words in str(error) else str(error)
    except Exception as error:
        return repr(error)
    return "not refused"


def change(name: str) -> None:
    WAYS[name][1].changed()


def test_the_ways_out_of_refusals_on_one_rank_work(pool: Pool) -> None:
    """EXA-9"""
    (failures,) = pool.run(follow_alone, 1)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", [name for name, (ranks, _) in WAYS.items() if ranks > 1])
def test_the_way_out_of_a_refusal_on_several_ranks_works(pool: Pool, name: str) -> None:
    """EXA-9"""
    world, way = WAYS[name]
    assert way.site in pool.run(refused_at, world, name)
    pool.run(change, world, name)
