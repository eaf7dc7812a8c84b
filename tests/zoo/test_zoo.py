"""Different models, wrapped without changes at several layouts, compared with one plain process.

`python -m tests.zoo` tests all of them; here are the hardest to capture.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.zoo import hand_made
from tests.zoo.devices import Tour, is_ok, visit
from tests.zoo.graphs import graph
from tests.zoo.here import run_here
from tests.zoo.tours import case_of, try_one
from tests.zoo.trial import Layout, made
from varuna.errors import CaptureError


def test_parameters_without_gradient_do_not_change(pool: Pool) -> None:
    """R5: no gradient and no decay, as in one process, over stages and replicas."""
    for layouts in ([Layout((1, 1)), Layout((2,), 3)], [Layout((2, 2))]):
        for answers in pool.run(try_one, layouts[0].world, "unused parameters", layouts):
            assert answers == ["ok"] * len(layouts)


@pytest.mark.parametrize("name", ["Switch Transformers", "Bloom"])
def test_hugging_face_models_train_without_changes(pool: Pool, name: str) -> None:
    """B8, R5, R6: an encoder and a decoder whose experts loop over data; an autograd.Function."""
    layouts = [Layout((1, 1)), Layout((2,), 3)]
    for answers in pool.run(try_one, 2, name, layouts, timeout=150):
        assert answers == ["ok"] * len(layouts)


@pytest.mark.parametrize(
    "name",
    [
        "in place",
        "nested in and out",
        "complex and integers",
        "own autograd.Function",
        "rows by data",
        "views of weights",
        "scripted loop, opaque",
    ],
)
def test_networks_written_by_hand_are_cut_anywhere(name: str) -> None:
    """R2, R5, R6"""
    run_here(hand_made.CASES[name], sizes=(7, 1))


@pytest.mark.parametrize("seed", range(8))
def test_random_graphs_are_cut_anywhere(seed: int) -> None:
    """R2, R5, R9: branches, joins, ties, changes in place, buffers, constants, results of any kind."""
    run_here(graph(seed))


@pytest.mark.parametrize(
    "name",
    ["nanoGPT", "nanoGPT, sparse experts", "graphs, offsets", "adversaries", "variational autoencoder"],
)
def test_networks_of_well_known_projects_train_as_in_one_process(pool: Pool, name: str) -> None:
    """EXA-2, EXA-7: as people write them, with the losses and habits that they have."""
    for answers in pool.run(try_one, 2, name, [Layout((1, 1))]):
        assert answers == ["ok"]


@pytest.mark.parametrize("name", ["LLaVA", "ViLT, opaque embeddings", "Gemma 3n, unclipped"])
def test_models_that_were_refused_are_cut_anywhere(name: str) -> None:
    """EXA-7: a list of the batch's images; patches in random order; changes of what `type_as` returns."""
    run_here(case_of(name))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("branch on data", "if y.sum() > 0"),
        ("fixed batch", "view(7, 2, 3)"),
        ("coupled samples", "compares every sample with every other"),
        ("numpy inside", "y.detach().numpy()"),
    ],
)
def test_models_that_cannot_be_captured_are_refused_by_their_line(name: str, words: str) -> None:
    """R6"""
    with pytest.raises(CaptureError) as refusal:
        run_here(hand_made.CASES[name])
    assert "hand_made.py:" in str(refusal.value) and words in str(refusal.value)


def test_a_device_is_toured_in_every_precision_and_placement() -> None:
    """EXA-7: each cell of the table has a result, also for models that cannot be captured."""
    tour = Tour("cpu", ("fp32", "bf16"), (1,))
    found = visit("factors", tour, 0, [0, 0])
    assert list(found) == ["fp32", "bf16"] and all(is_ok(said) for (said,) in found.values())
    refused = visit("branch on data", tour, 0, [0, 0])
    assert all(said.startswith("not captured: ") for (said,) in refused.values())


def test_inputs_of_another_shape_or_dtype_are_captured_separately(pool: Pool) -> None:
    """R2: and cut at the same places on all ranks; also evaluation and autocast."""
    pool.run(call_with_other_inputs, 2)


def call_with_other_inputs() -> None:
    case = case_of("Llama, no labels")
    plain, model = made(case), made(case)
    wrapped = RaNNCModule(model, device="cpu", partition_num=2, pipeline_num=2, timeout_seconds=60)
    own = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    ids = torch.randint(5, 50, (6, 12), generator=torch.Generator().manual_seed(1))
    calls: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (ids, {}),
        (ids[:, :9], {}),
        (ids.int(), {"attention_mask": (ids > 9).long()}),
        (ids[:, :9], {"attention_mask": (ids[:, :9] > 9)}),
    ]
    for words, rest in calls:
        low = words.dtype == torch.int32
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            expected = plain(words, **rest, use_cache=False)["logits"]
            found = wrapped(words[own], **{name: value[own] for name, value in rest.items()})["logits"]
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected[own], rtol=0, atol=0.05 if low else 1e-5)
        expected.float().square().mean().backward()
        found.float().square().mean().backward()
        close = {"rtol": 0.1, "atol": 0.05} if low else {"rtol": 1e-4, "atol": 1e-6}
        gradient = plain.model.layers[0].mlp.up_proj.weight.grad  # type: ignore[union-attr, index]
        torch.testing.assert_close(
            wrapped.get_param_grad("model.layers.0.mlp.up_proj.weight"), gradient, **close
        )
        plain.zero_grad()
        wrapped.zero_grad()
    wrapped.undeploy()
