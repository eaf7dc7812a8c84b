"""Models without any CutPoint: trained at any layout as one process would, element by element."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varuna.train.build
from tests.pool import Pool
from tests.tasks import SEED, compare, find_loss, make_optimizer, stage_map, train, train_plainly
from tests.toys import make_inputs, make_model
from varuna import Varuna, plain_randomness
from varuna.capture import Source

F64 = {"rtol": 1e-10, "atol": 1e-12}
UNCUT = {"model_options": {"cutpoints": False}}


@cache
def plain(name: str, **options: Any) -> dict[str, Any]:
    return train_plainly(name, **options)


@pytest.mark.parametrize(("depth", "width", "chunk"), [(1, 1, 3), (2, 1, 3), (4, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("name", ["Plain", "GPT"])
def test_a_plain_model_trains_at_any_layout(
    pool: Pool, name: str, depth: int, width: int, chunk: int
) -> None:
    """R1, R5, V2, V18: evaluation between the steps included."""
    shared = {"batch": 8, "dtype": torch.float64, "evaluate_between": True}
    results = pool.run(train, depth * width, name, depth, width, chunk=chunk, **shared, **UNCUT)
    expected = plain(name, **shared)
    for found in results:
        compare(found, expected, **F64)
        torch.testing.assert_close(found["evaluations"], expected["evaluations"], **F64)


@pytest.mark.parametrize("name", ["Odd", "Reused", "Branching"])
def test_anything_crosses_a_cut_that_nobody_placed(pool: Pool, name: str) -> None:
    """R2, R5: skips, ties, several tensors, opaque modules, constants."""
    shared = {"batch": 6, "chunk": 1, "dtype": torch.float64}
    found = pool.run(train, 3, name, 3, 1, **shared, **UNCUT)[0]
    compare(found, plain(name, **shared), **F64)


@pytest.mark.parametrize("recompute", [False, True])
def test_buffers_and_changes_in_place_are_exact_in_every_microbatch(pool: Pool, recompute: bool) -> None:
    """R9: BatchNorm, in-place ReLU and a skip, at 3 stages, as in one process with the same micro-batches."""
    shared = {"batch": 8, "chunk": 4, "dtype": torch.float64}
    found = pool.run(train, 3, "Conv", 3, 1, recompute=recompute, **shared, **UNCUT)[0]
    compare(found, plain("Conv", **shared), **F64)


def test_the_layout_changes_neither_names_nor_fingerprint(pool: Pool) -> None:
    """R10: so profiles, plans and checkpoints of one model fit each other."""
    wrapped = [pool.run(names_and_fingerprint, depth)[0] for depth in (1, 2, 4)]
    assert wrapped[0] == wrapped[1] == wrapped[2]
    assert wrapped[0][1] == sorted(make_model("GPT", cutpoints=False).state_dict())


def names_and_fingerprint() -> tuple[str, list[str]]:
    model = make_model("GPT", cutpoints=False)
    inputs = make_inputs("GPT", 2, torch.Generator().manual_seed(1))
    depth = torch.distributed.get_world_size()
    wrapped = Varuna(model, stage_map(depth, 1), inputs, 4, 2, device="cpu", from_cache=False)
    found = wrapped.plan.fingerprint, sorted(wrapped.full_state_dict())
    wrapped.close()
    return found


def test_a_depth_that_the_model_has_no_operations_for_is_refused(pool: Pool) -> None:
    """R5: one operation is one stage."""
    for message in pool.run(refused_depth, 2):
        assert "2 pipeline stages" in message and "1 to 1" in message


class OneOperation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def refused_depth() -> str:
    with pytest.raises(ValueError) as refusal:
        Varuna(OneOperation(), "0;1;", {"x": torch.randn(2, 3)}, 4, 2, device="cpu")
    return str(refusal.value)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_a_hugging_face_model_trains_as_it_is(pool: Pool, name: str) -> None:
    """B8, R5: dropout, ties, RoPE and encoder-decoder skips, over two stages and by one process."""
    losses, state = pool.run(train_hugging_face, 2, name)[0]
    expected_losses, expected = train_hugging_face(name, plainly=True)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=1e-11)
    assert state.keys() >= expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-8, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}")


def train_hugging_face(name: str, plainly: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    from tests.capture.test_hugging_face import MODELS

    varuna.train.build.Source = Source  # type: ignore[misc]
    torch.manual_seed(0)
    make, _, inputs = MODELS[name]
    model: Any = make().double().train()
    if not plainly:
        model = Varuna(model, "0;1;", inputs, 4, 2, device="cpu", seed=SEED)
    optimizer = make_optimizer("sgd", model.parameters())
    losses = []
    if not plainly:
        model.set_optimizer(optimizer)
    for step in range(2):
        if plainly:
            total = 0.0
            for first in (0, 2):
                part = {key: value[first : first + 2] for key, value in inputs.items()}
                with plain_randomness(seed=SEED, step=step, batch_size=2, first_sample=first):
                    loss = find_loss(model(**part)) / 2
                loss.backward()
                total += loss.item()
            losses.append(total)
        else:
            losses.append(model.step(inputs)[0])
        optimizer.step()
        model.zero_grad()
    if plainly:
        return losses, {key: value.detach() for key, value in model.named_parameters()}
    state = model.full_state_dict()
    model.close()
    return losses, state
