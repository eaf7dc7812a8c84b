"""Semantics of a step in any layout: randomness, buffers, evaluation, precision, clipping, optimizers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.tasks import SEED, compare, global_batch, stage_map, take, train, train_plainly
from tests.toys import make_inputs, make_model
from varuna import CutPoint, SampleOrder, Varuna
from varuna.types import spread_evenly

F64 = {"rtol": 1e-10, "atol": 1e-12}
DROPOUT = {"dropout": 0.3}


def test_dropout_does_not_depend_on_the_depth_to_the_bit(pool: Pool) -> None:
    """V16: recompute and every schedule included."""
    states = []
    for depth, schedule, recompute in [
        (1, "varuna", False),
        (2, "varuna", True),
        (3, "gpipe", False),
        (4, "zero-bubble", False),
        (2, "1f1b", [True, False]),
    ]:
        found = pool.run(
            train,
            depth,
            "Plain",
            depth,
            1,
            batch=6,
            chunk=2,
            schedule=schedule,
            recompute=recompute,
            model_options=DROPOUT,
        )[0]
        states.append(found["state"])
    for state in states[1:]:
        for name, value in states[0].items():
            assert torch.equal(state[name], value), name


@pytest.mark.parametrize(("depth", "width", "chunk"), [(1, 1, 6), (2, 1, 1), (2, 2, 2), (1, 3, 4), (1, 4, 1)])
def test_dropout_equals_a_plain_process_that_draws_by_the_same_rule(
    pool: Pool, depth: int, width: int, chunk: int
) -> None:
    """V16, B2: whatever the depth, the width and the micro-batch size, ragged shares included."""
    shared = {"batch": 7, "dtype": torch.float64, "model_options": DROPOUT}
    found = pool.run(train, depth * width, "GPT", depth, width, chunk=chunk, **shared)[0]
    compare(found, train_plainly("GPT", random=True, **shared), **F64)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.cut = nn.Linear(5, 5), nn.Linear(5, 5), CutPoint()

    def forward(self, x: Tensor, drops: bool, repeats: bool) -> Tensor:
        x = self.cut(nn.functional.dropout(self.first(x), 0.5 if drops else 0.0))
        return self.last(self.first(x) if repeats else x).square().mean()


def switch_on(mapping: str, switch: str) -> str:
    inputs = {"x": torch.randn(2, 5), "drops": False, "repeats": False}
    wrapped = Varuna(Switched(), mapping, inputs, 4, 2, device="cpu")
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    with pytest.raises(Exception) as refusal:
        wrapped.step({**inputs, switch: True})
    return str(refusal.value)


def test_what_the_sample_inputs_did_not_turn_on_is_refused_where_it_would_be_wrong(pool: Pool) -> None:
    """V16: replicas would draw alike, and a stage would lack a weight."""
    for mapping, switch, expected_text in (
        ("0,1;", "drops", "the model draws random numbers"),
        ("0;1;", "repeats", "the stage uses first.weight, first.bias"),
    ):
        for message in pool.run(switch_on, 2, mapping, switch):
            assert f"{expected_text}, with the sample inputs it did not" in message


def test_masks_differ_between_steps_and_samples(pool: Pool) -> None:
    """V16: the same input twice, in two steps and as two samples, sees other masks."""
    (first, second), samples = pool.run(losses_of_equal_inputs, 1)[0]
    assert first != second
    assert len(set(samples)) == len(samples)


def losses_of_equal_inputs() -> tuple[list[float], list[float]]:
    model = make_model("Plain", dropout=0.5)
    row = make_inputs("Plain", 1, torch.Generator().manual_seed(3))
    both = {key: value.repeat(2, 1) for key, value in row.items() if isinstance(value, Tensor)}
    wrapped = Varuna(model, "0;", both, 4, 1, device="cpu", seed=1)
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.0))
    losses = [wrapped.step(both)[0] for _ in range(2)]
    gradients = []
    for count in (1, 2, 3):  # the n-th equal sample adds something of its own
        wrapped.iteration = 0
        wrapped.zero_grad()
        wrapped.step({key: value[:1].repeat(count, 1) for key, value in both.items()})
        gradients.append(float(wrapped.state_dict() and wrapped.step(row)[0]))
    return losses, [*losses, gradients[0]]


@pytest.mark.parametrize(
    ("depth", "width", "recompute"), [(1, 1, True), (2, 1, True), (4, 1, False), (2, 2, True)]
)
def test_batchnorm_changes_once_per_microbatch_as_in_one_process(
    pool: Pool, depth: int, width: int, recompute: bool
) -> None:
    """V17, and a silent fault of peers: capturing or recomputing must not advance the statistics."""
    shared = {"batch": 8, "chunk": 2, "dtype": torch.float64, "evaluate_between": True}
    found = pool.run(train, depth * width, "Conv", depth, width, recompute=recompute, **shared)[0]
    expected = train_plainly("Conv", **shared)
    compare(found, expected, **F64)
    torch.testing.assert_close(found["evaluations"], expected["evaluations"], **F64)
    assert int(found["state"]["norm1.num_batches_tracked"]) == 4 * 3


def test_what_no_gradient_reaches_has_none_and_every_use_of_a_batchnorm_counts(pool: Pool) -> None:
    """V17, V18: AdamW would shrink weights of gradient zero; evaluation counts nothing, on any replica."""
    shared = {"batch": 8, "chunk": 2, "dtype": torch.float64, "optimizer": "adam", "evaluate_between": True}
    found = pool.run(train, 4, "Aside", 2, 2, recompute=[True, False], **shared)[3]
    expected = train_plainly("Aside", **shared)
    assert int(found["state"].pop("calls")) == 4 * 3 and expected["state"].pop("calls")
    assert not {"aside.weight", "tied.weight"} & found["gradients"].keys()
    compare(found, expected, **F64)
    torch.testing.assert_close(found["evaluations"], expected["evaluations"], **F64)


@pytest.mark.parametrize(("depth", "width"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_evaluation_between_steps_is_exact_and_changes_nothing(pool: Pool, depth: int, width: int) -> None:
    """V18, a silent fault of peers: live gradients stay as they are; ragged sizes included."""
    shared = {
        "batch": 7,
        "steps": 4,
        "accumulate": 2,
        "dtype": torch.float64,
        "evaluate_between": True,
        "model_options": DROPOUT,
    }
    found = pool.run(train, depth * width, "GPT", depth, width, chunk=2, **shared)[0]
    expected = train_plainly("GPT", random=True, **shared)
    compare(found, expected, **F64)
    torch.testing.assert_close(found["evaluations"], expected["evaluations"], **F64)


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_clipping_is_by_the_whole_models_norm(pool: Pool, depth: int, width: int) -> None:
    """V13: over stages, ties counted once, in one process too; the true norm can be read."""
    shared = {"batch": 8, "clip": 0.1, "dtype": torch.float64, "optimizer": "adam"}
    found = pool.run(train, depth * width, "GPT", depth, width, chunk=2, **shared)[0]
    expected = train_plainly("GPT", **shared)
    compare(found, expected, **F64)
    torch.testing.assert_close(found["norms"], expected["norms"], **F64)


@pytest.mark.timeout(300)
def test_compiled_stages_train_the_same(pool: Pool) -> None:
    """V10, V19: torch.compile of each stage, with dropout, a split backward, ragged micro-batches."""
    shared = {"batch": 5, "model_options": {"layers": 2, "dropout": 0.3}, "dtype": torch.float64}
    options = {"compile": True, "schedule": "zero-bubble", "timeout_seconds": 240}
    found = pool.run(train, 2, "Plain", 2, 1, chunk=2, timeout=280, **options, **shared)[0]
    compare(found, train_plainly("Plain", random=True, **shared), **F64)


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_equals_autocast_in_one_process(pool: Pool, precision: str) -> None:
    """V14, a silent fault of peers: boundaries travel in the precision that they have."""
    expected = autocast_losses(precision)
    for depth, width in [(1, 1), (2, 1), (4, 1), (2, 2)]:
        found = pool.run(train_in, depth * width, depth, width, precision)[0]
        torch.testing.assert_close(found, expected, rtol=2e-2 if precision == "bf16" else 2e-3, atol=1e-3)
    exact = pool.run(train_in, 1, 1, 1, precision)[0]
    for depth in (2, 4):  # the same micro-batches: only the place of the cut differs
        torch.testing.assert_close(
            pool.run(train_in, depth, depth, 1, precision)[0], exact, rtol=1e-5, atol=0
        )


def train_in(depth: int, width: int, precision: Any) -> list[float]:
    return train("GPT", depth, width, batch=8, chunk=2, precision=precision, steps=4)["losses"]  # type: ignore[no-any-return]


def autocast_losses(precision: str) -> list[float]:
    model = make_model("GPT")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16 if precision == "bf16" else torch.float16):
            loss = model(**global_batch("GPT", step, 8, torch.float32))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_an_overflow_anywhere_makes_every_rank_skip_and_halves_the_scale(pool: Pool) -> None:
    """V14: in one stage of one replica alone; the static scale stays."""
    for found in pool.run(overflowing, 4, "dynamic"):
        assert found == ([False, True, False], [1024.0, 512.0, 512.0])
    for found in pool.run(overflowing, 2, 128.0):
        assert found == ([False, True, False], [128.0, 128.0, 128.0])


def overflowing(loss_scale: Any) -> tuple[list[bool], list[float | None]]:
    import torch.distributed as dist

    width = dist.get_world_size() // 2
    model = make_model("Plain")
    wrapped = Varuna(
        model, stage_map(2, width), make_inputs("Plain", 2, torch.Generator()), 4, 2, fp16=True, device="cpu"
    )
    wrapped.set_optimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.0), loss_scale=loss_scale, init_loss_scale=1024
    )
    overflows, scales = [], []
    for step in range(3):
        inputs = take(global_batch("Plain", step, 4, torch.float32), range(4 // width), 4)
        if step == 1 and wrapped.rank_within_stage == width - 1:
            inputs["y"] = inputs["y"] * 1e30  # type: ignore[operator]
        overflows.append(wrapped.step(inputs)[1])
        wrapped.zero_grad()
        scales.append(wrapped.get_loss_scale())
    wrapped.close()
    return overflows, scales


# ---------------------------------------------------------------- optimizers, weights, data


@pytest.mark.parametrize(("depth", "width", "kind"), [(1, 2, "adagrad"), (2, 2, "adam"), (1, 4, "adam")])
def test_a_sharded_optimizer_gives_the_same_updates(pool: Pool, depth: int, width: int, kind: str) -> None:
    """V15: each replica keeps a share of the state, together the whole, and the updates are the same.

    Adagrad has state before its first step.
    """
    shared = {"batch": 8, "dtype": torch.float64, "optimizer": kind, "steps": 4}
    found = pool.run(train, depth * width, "GPT", depth, width, chunk=2, shard_optimizer=True, **shared)[0]
    compare(found, train_plainly("GPT", **shared), **F64)
    held = pool.run(optimizer_state, width, width)
    assert sum(held) == 10 and max(held) <= spread_evenly(10, parts=width)[0] + 2


def optimizer_state(width: int) -> int:
    model = make_model("Plain")
    wrapped = Varuna(
        model,
        stage_map(1, width),
        make_inputs("Plain", 2, torch.Generator()),
        4,
        2,
        device="cpu",
        shard_optimizer=True,
    )
    optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped.set_optimizer(optimizer)
    wrapped.set_optimizer(optimizer)  # once more shares nothing out again
    wrapped.step(make_inputs("Plain", 4 // width, torch.Generator()))
    optimizer.step()
    wrapped.close()
    return len(optimizer.state)


def test_param_groups_and_lr_schedulers_work(pool: Pool) -> None:
    """V15: groups by name, a schedule, a stage with an empty group."""
    expected = grouped(make_model("Plain", dtype=torch.float64), wrap=False)
    for found in pool.run(grouped_over_stages, 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **F64)


def grouped_over_stages() -> dict[str, Tensor]:
    return grouped(make_model("Plain", dtype=torch.float64), wrap=True)


def grouped(model: nn.Module, wrap: bool) -> dict[str, Tensor]:
    trained: Any = model
    if wrap:
        sample = make_inputs("Plain", 2, torch.Generator(), torch.float64)
        trained = Varuna(model, "0;1;", sample, 6, 2, device="cpu")
    groups = [
        {"params": [p for n, p in trained.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in trained.named_parameters() if n.endswith("weight")], "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if wrap:
        trained.set_optimizer(optimizer)
    for step in range(3):
        inputs = global_batch("Plain", step, 6, torch.float64)
        if wrap:
            trained.step(inputs)
        else:
            model(**inputs).backward()
        optimizer.step()
        schedule.step()
        trained.zero_grad()
    state: dict[str, Tensor] = trained.full_state_dict() if wrap else model.state_dict()
    return state


def test_a_loss_can_be_weighted_by_tokens(pool: Pool) -> None:
    """V11: labels of -100 do not count; the weight of a micro-batch is its number of tokens."""
    model = make_model("GPT", dtype=torch.float64)
    inputs = ragged_tokens()
    loss = model(**inputs)
    loss.backward()
    for depth, width in [(1, 1), (2, 1), (2, 2)]:
        for found, gradient in pool.run(token_weighted, depth * width, depth, width):
            assert found == pytest.approx(loss.item(), rel=1e-12)
            torch.testing.assert_close(gradient, model.get_parameter("norm.weight").grad, **F64)


def test_an_empty_share_takes_part_and_changes_nothing(pool: Pool) -> None:
    """V11: a last batch smaller than the number of replicas, with dropout or BatchNorm."""
    for name, options in (("GPT", DROPOUT), ("Conv", {})):
        shared = {
            "batch": 4,
            "batches": (4, 1),
            "steps": 4,
            "dtype": torch.float64,
            "model_options": options,
        }
        found = pool.run(train, 2, name, 1, 2, chunk=2, **shared)[1]
        expected = train_plainly(name, random=bool(options), chunk=2 if name == "Conv" else None, **shared)
        compare(found, expected, **F64)


def ragged_tokens() -> dict[str, Any]:
    inputs: dict[str, Any] = make_inputs("GPT", 6, torch.Generator().manual_seed(5))
    for i in range(6):
        inputs["labels"][i, max(i - 1, 0) :] = -100  # samples 0 and 1 have no token: a loss of 0 / 0
    return inputs


def count_tokens(inputs: Any) -> float:
    return float((inputs["labels"] != -100).sum())


def token_weighted(depth: int, width: int) -> tuple[float, Tensor]:
    model = make_model("GPT", dtype=torch.float64)
    inputs = ragged_tokens()
    wrapped = Varuna(model, stage_map(depth, width), inputs, 6, 2, device="cpu", loss_weight=count_tokens)
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    order = SampleOrder(6, batch_size=6, shuffle=False)
    own = order.replica(step=0, replica=wrapped.rank_within_stage, num_replicas=width)
    loss, _ = wrapped.step(take(inputs, own, 6))
    gradients = wrapped._session.gather(
        {n: p.grad for n, p in wrapped.named_parameters()}, dict[str, torch.Tensor | None]
    )
    wrapped.close()
    return loss, next(part["norm.weight"] for part in gradients if "norm.weight" in part)


def test_the_seed_decides_and_another_seed_draws_other_masks(pool: Pool) -> None:
    """V16: the documented rule starts from the seed."""
    shared = {"batch": 4, "model_options": DROPOUT}
    first = pool.run(train, 1, "GPT", 1, 1, chunk=2, **shared)[0]
    again = pool.run(train, 1, "GPT", 1, 1, chunk=4, **shared)[0]
    other = pool.run(train, 1, "GPT", 1, 1, chunk=4, seed=SEED + 1, **shared)[0]
    assert first["losses"] == pytest.approx(again["losses"], rel=1e-5)
    assert first["losses"] != pytest.approx(other["losses"], rel=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
def test_other_buffers_are_averaged_and_counters_added_up_over_replicas(pool: Pool, depth: int) -> None:
    """V17: of a model without BatchNorm or dropout; a ragged batch included."""
    shared = {"batch": 4, "batches": (4, 3), "steps": 2, "dtype": torch.float64}
    found = pool.run(train, 2 * depth, "Counting", depth, 2, chunk=2, **shared)[0]
    expected = train_plainly("Counting", **shared)
    means = []
    for step, size in ((0, 4), (1, 3)):
        x: Any = global_batch("Counting", step, size, torch.float64)["x"]
        means.append((x[:2].mean() + x[2:].mean()) / 2)
    torch.testing.assert_close(found["state"]["mean"], 0.25 * means[0] + 0.5 * means[1], **F64)
    assert int(found["state"]["calls"]) == 4  # two replicas, one micro-batch each, two steps
    for buffer in ("mean", "calls"):
        del found["state"][buffer], expected["state"][buffer]
    compare(found, expected, **F64)
