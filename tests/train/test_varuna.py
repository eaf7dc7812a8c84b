"""Wrapping a model: what a rank holds afterwards, what is refused and how, what is remembered."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pool import Pool
from tests.tasks import compare, logged, make_optimizer, stage_map, train, train_plainly
from tests.toys import Plain, make_inputs, make_model
from varuna import CutPoint, Varuna, get_this_rank_config_varuna, get_varuna_config
from varuna.errors import CaptureError, WorkerError


def sample(batch: int = 2) -> dict[str, Any]:
    return make_inputs("Plain", batch, torch.Generator().manual_seed(2))


def wrap(model: nn.Module | None = None, mapping: str = "0;", **options: Any) -> Varuna:
    arguments: dict[str, Any] = {"dummy_inputs": sample(), "batch_size": 4, "chunk_size": 2, "device": "cpu"}
    return Varuna(model or Plain(), mapping, **(arguments | options))


# ---------------------------------------------------------------- what a rank holds


def test_each_rank_holds_its_stage_alone_under_the_original_names(pool: Pool) -> None:
    """V5: it trains the user's own tensors of its stage; those of other stages are left as they were."""
    expected = dict(make_model("GPT").named_parameters(remove_duplicate=False))
    parts = pool.run(held_names, 3)
    for names, untouched in parts:
        assert untouched and names <= expected.keys()
    names = [name for part, _ in parts for name in part]
    assert set(names) == expected.keys()
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {"embed.weight", "head.weight"}  # one tied tensor, on the first and the last stage


def held_names() -> tuple[set[str], bool]:
    model = make_model("GPT")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = make_inputs("GPT", 2, torch.Generator())
    wrapped = Varuna(model, "0;1;2;", inputs, 4, 2, device="cpu")
    optimizer = make_optimizer("sgd", wrapped.parameters())
    wrapped.set_optimizer(optimizer)
    wrapped.step(make_inputs("GPT", 4, torch.Generator()))
    optimizer.step()
    names = {name for name, _ in wrapped.named_parameters(remove_duplicate=False)}
    after = {name: value for name, value in model.state_dict().items() if name not in names}
    untouched = all(torch.equal(value, before[name]) for name, value in after.items())
    untouched &= all(
        p.data_ptr() == model.get_parameter(name).data_ptr() for name, p in wrapped.named_parameters()
    )
    wrapped.close()
    return names, untouched


def test_weights_on_the_device_are_not_copied() -> None:
    """EXA-7: as with DistributedDataParallel, the plain model has the trained weights."""
    model = Plain()
    wrapped = wrap(model)
    for name, parameter in wrapped.named_parameters():
        assert parameter.data_ptr() == model.get_parameter(name).data_ptr()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    wrapped.set_optimizer(optimizer)
    wrapped.step(sample(4))
    optimizer.step()
    assert wrapped.evaluate(sample(4)) == pytest.approx(float(model.train()(**sample(4))), rel=1e-6)


def test_a_meta_model_is_initialised_stage_by_stage_the_same_at_every_depth(pool: Pool) -> None:
    """V5: no process ever holds all parameters; values do not depend on the layout."""
    states = [pool.run(meta_state, depth)[0] for depth in (1, 3)]
    assert states[0].keys() == dict(make_model("GPT").named_parameters(remove_duplicate=False)).keys()
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value) and not value.is_meta


def meta_state() -> dict[str, Tensor]:
    import torch.distributed as dist

    with torch.device("meta"):
        model = make_model("GPT")
    wrapped = Varuna(
        model,
        stage_map(dist.get_world_size(), 1),
        make_inputs("GPT", 2, torch.Generator()),
        4,
        2,
        seed=5,
        device="cpu",
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    state = wrapped.full_state_dict()
    wrapped.close()
    return state


def test_a_meta_model_takes_given_values(pool: Pool) -> None:
    """V5: from a state dict, here the plain model's."""
    with torch.device("meta"):
        model = make_model("Plain")
    values = make_model("Plain").state_dict()
    wrapped = wrap(model, initialize=values)
    count = sum(value.numel() for value in values.values())
    assert repr(wrapped) == f"Varuna(stage 0 of 1, replica 0 of 1, {count:,} parameters in fp32 on cpu)"
    for name, value in wrapped.state_dict().items():
        assert torch.equal(value, values[name])


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).detach().mean()


def test_a_loss_that_no_weight_leads_to_is_refused_but_frozen_weights_can_be_evaluated() -> None:
    """V7, V18"""
    x = torch.randn(4, 4)
    model = Detached()
    with pytest.raises(CaptureError, match="the loss does not depend on any trainable weight"):
        Varuna(model, "0", {"x": x}, 4, 2, device="cpu")
    wrapped = Varuna(model.requires_grad_(False), "0", {"x": x}, 4, 2, device="cpu")
    assert wrapped.evaluate({"x": x}) == pytest.approx(float(model(x)), rel=1e-5, abs=1e-7)


def test_a_function_may_give_the_sample_inputs() -> None:
    """V4: `get_batch_fn(size, device=None)` in place of a dict."""
    asked = []

    def get_batch(size: int, device: Any = None) -> dict[str, Any]:
        asked.append((size, device))
        return sample(size)

    assert wrap(dummy_inputs=get_batch).plan.depth == 1
    assert wrap(dummy_inputs=sample).plan.depth == 1  # one that knows of no device
    assert asked and asked[0][0] >= 2


def test_maps_are_read_as_the_launcher_writes_them() -> None:
    """V9."""
    assert get_varuna_config("0,1;2,3;4,5;") == (3, 2)
    assert get_this_rank_config_varuna("0,1;2,3;4,5;", 3) == (1, 1)
    with pytest.raises(ValueError, match="rank 6 is not in"):
        get_this_rank_config_varuna("0,1;2,3;4,5;", 6)
    for text in ("", "a;b;", "0,1;2;", "0;0;", ";"):
        with pytest.raises(ValueError, match="stage_to_rank_map"):
            get_varuna_config(text)


def test_it_behaves_as_a_module() -> None:
    """V18: train, eval, zero_grad, state dicts; forward and moving say what to do instead."""
    model = make_model("Plain", dropout=0.4)
    wrapped = wrap(model)
    wrapped.set_optimizer(make_optimizer("sgd", wrapped.parameters()))
    wrapped.eval()
    quiet = [wrapped.step(sample(4))[0] for _ in range(2)]
    assert quiet[0] == quiet[1] and not wrapped.training
    wrapped.train()
    assert wrapped.step(sample(4))[0] != quiet[0]
    assert all(p.grad is not None for p in wrapped.parameters())
    wrapped.zero_grad()
    assert all(p.grad is None for p in wrapped.parameters())
    assert wrapped.state_dict().keys() == model.state_dict().keys()
    other = make_model("Plain", seed=9)
    wrapped.load_state_dict(other.state_dict())
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in wrapped.state_dict().items())
    with pytest.raises(RuntimeError, match=r"model.step\(inputs\)"):
        wrapped(**sample())
    with pytest.raises(RuntimeError, match="cannot change its device"):
        wrapped.half()
    with pytest.raises(AttributeError, match=r"no attribute 'generate'.*call gather_model\(\)"):
        _ = wrapped.generate
    with pytest.raises(RuntimeError, match="no \\['nonsense'\\]"):
        wrapped.load_state_dict({**other.state_dict(), "nonsense": torch.ones(1)})


# ---------------------------------------------------------------- what is declared shared


class TwoWeights(nn.Module):
    """Two Parameters meant to be one, as the original's documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 5))
        self.second = nn.Parameter(self.first.detach().clone())
        self.cut = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.cut(torch.tanh(x @ self.first))
        return F.mse_loss(x @ self.second.t(), y)


@pytest.mark.parametrize("depth", [1, 2])
def test_declared_weights_are_shared(pool: Pool, depth: int) -> None:
    """V6: two parameters declared one get the summed gradient and stay equal to the bit."""
    torch.manual_seed(0)
    plain = TwoWeights()
    inputs = make_inputs("Reused", 4, torch.Generator().manual_seed(1))
    for _ in range(3):
        plain(**inputs).backward()
        with torch.no_grad():
            step = 0.1 * (plain.first.grad + plain.second.grad)  # type: ignore[operator]
            plain.first -= step
            plain.second -= step
        plain.zero_grad()
    for state in pool.run(train_shared, depth, depth):
        assert torch.equal(state["first"], state["second"])
        torch.testing.assert_close(state["first"], plain.first.detach())


def train_shared(depth: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    inputs = make_inputs("Reused", 4, torch.Generator().manual_seed(1))
    wrapped = Varuna(
        TwoWeights(), stage_map(depth, 1), inputs, 4, 2, device="cpu", shared_weights=[("first", "second")]
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped.set_optimizer(optimizer)
    for _ in range(3):
        wrapped.step(inputs)
        optimizer.step()
        wrapped.zero_grad()
    state = wrapped.full_state_dict()
    wrapped.close()
    return state


# ---------------------------------------------------------------- what is refused


class Branches(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.sum() > 0:  # the line to blame
            x = -x
        return super().forward(x, y)


class CalledTwice(Plain):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.cuts[0](x), y)


class NeverCalled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten = CutPoint()


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "inputs not a dict": ({"dummy_inputs": [1, 2]}, "inputs must be a dict"),
    "batch size": ({"batch_size": 0}, "batch_size must be a positive whole number"),
    "chunk size": ({"chunk_size": 2.5}, "chunk_size must be a positive whole number"),
    "no map": ({"mapping": None}, "VARUNA_STAGE_TO_RANK_MAP"),
    "a class": ({"model": Plain}, "not the class Plain"),
    "wrapped twice": ({"model": nn.DataParallel(Plain())}, "already wrapped in DataParallel"),
    "lists": ({"dummy_inputs": {"x": [1.0], "y": [1.0]}}, "no input has a batch: got 'x', a list"),
    "rank not there": ({"mapping": "0;1;7;"}, "it names ranks [7], which do not exist"),
    "rank left out": ({"mapping": "0;1;"}, "it does not name ranks [2]"),
    "too deep": ({"model": Plain(layers=2)}, "allows 1 to 2"),
    "called twice": ({"model": CalledTwice()}, "cuts.0"),
    "never called": ({"model": NeverCalled()}, "forgotten"),
    "branch on data": ({"model": Branches()}, "the line to blame"),
    "schedule": ({"schedule": "2f2b"}, "schedule must be one of varuna, 1f1b, gpipe, zero-bubble"),
    "precision": ({"precision": "fp8"}, "precision must be one of fp32, bf16, fp16"),
    "odd sizes": ({"dummy_inputs": {"x": torch.ones(4, 7), "y": torch.ones(3, 7)}}, "the input 'y' has 3"),
    "recompute": ({"recompute": [True]}, "one for each of the 3 stages"),
    "spans": ({"spans": [(0, 2), (3, 4), (4, 5)]}, "contiguous, non-empty ranges"),
}
REFUSED_BY_CAPTURE = {"lists", "called twice", "never called", "branch on data", "odd sizes"}
"""Their messages end with a sentence of advice; others name the allowed values."""


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused_on_every_rank_with_advice(pool: Pool, case: str) -> None:
    """V7, B7."""
    for message in pool.run(refusal, 3, case):
        assert REFUSALS[case][1] in message
        advice = [". "] if case in REFUSED_BY_CAPTURE else ["(", "one of"]
        assert any(words in message for words in advice)


def refusal(case: str) -> str:
    options = {"mapping": "0;1;2;", **REFUSALS[case][0]}
    with pytest.raises((ValueError, TypeError)) as refused:
        wrap(**options)
    return str(refused.value)


def test_what_only_one_rank_gets_wrong_reaches_all(pool: Pool) -> None:
    """V7, B7: the one raises its own error, the others one that quotes it."""
    messages = pool.run(one_sided_refusals, 2)
    for own, others in zip(messages[1], messages[0], strict=True):
        assert own.split("\n")[0] in others and "rank 1 (stage 1, replica 0)" in others


def one_sided_refusals() -> list[str]:
    import torch.distributed as dist

    second = dist.get_rank() == 1
    kind = Exception if second else WorkerError
    messages = []
    with pytest.raises(kind) as refused:
        wrap(mapping="0;1;", dummy_inputs=17 if second else sample())
    messages.append(str(refused.value))
    wrapped = wrap(mapping="0;1;")
    if not second:
        wrapped.set_optimizer(make_optimizer("sgd", wrapped.parameters()))
    with pytest.raises(kind) as refused:  # the second has set no optimizer
        wrapped.step(sample(4))
    messages.append(str(refused.value))
    wrapped.close()
    return messages


def test_a_step_refuses_what_does_not_fit() -> None:
    """V7: no optimizer, not a dict, more than this replica's share, an optimizer made before wrapping."""
    model = Plain()
    wrapped = wrap(model)
    with pytest.raises(RuntimeError, match="set_optimizer"):
        wrapped.step(sample(4))
    with pytest.raises(ValueError, match="after wrapping"):
        wrapped.set_optimizer(make_optimizer("sgd", model.parameters()))
    with pytest.raises(TypeError, match=r"one torch\.optim\.Optimizer, not a list"):
        wrapped.set_optimizer([make_optimizer("sgd", wrapped.parameters())])  # type: ignore[arg-type]
    wrapped.set_optimizer(make_optimizer("sgd", wrapped.parameters()))
    with pytest.raises(TypeError, match="'rate' must have state_dict"):
        wrapped.register("rate", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a dict"):
        wrapped.step([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no replica gave a sample"):
        wrapped.step(sample(0))
    with pytest.raises(ValueError, match=r"given 5 samples.*takes 4 of"):
        wrapped.step(sample(5))
    assert wrapped.step(sample(4))[0] > 0  # nothing was lost by the refusals


def test_sizes_other_than_the_samples_are_captured_when_met(pool: Pool) -> None:
    """V12: another sequence length than the sample's needs no new wrapping."""
    expected = [make_model("GPT")(**tokens(length)).item() for length in (6, 4, 6)]
    for losses in pool.run(losses_of_lengths, 2):
        assert losses == pytest.approx(expected, rel=1e-6)


def tokens(length: int) -> dict[str, Any]:
    inputs = make_inputs("GPT", 4, torch.Generator().manual_seed(length))
    return {name: value[:, :length] for name, value in inputs.items() if isinstance(value, Tensor)}


def losses_of_lengths() -> list[float]:
    wrapped = Varuna(make_model("GPT"), "0;1;", tokens(6), 4, 2, device="cpu")
    wrapped.set_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.0))
    losses = [wrapped.step(tokens(length))[0] for length in (6, 4, 6)]
    wrapped.close()
    return losses


# ---------------------------------------------------------------- what is remembered


def test_the_partition_is_remembered_until_the_model_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V8: by its graph's fingerprint; `from_cache=False` searches and checks again."""
    monkeypatch.setenv("VARUNA_CACHE", str(tmp_path))
    checks = []
    monkeypatch.setattr("varuna.train.validate.check_capture", lambda *_, **__: checks.append(1))
    wrap(Plain())
    wrap(Plain())
    assert len(checks) == 1 and len(list(tmp_path.iterdir())) == 1
    wrap(Plain(layers=4))
    assert len(checks) == 2
    wrap(Plain(), from_cache=False)
    assert len(checks) == 3
    for file in tmp_path.iterdir():
        file.write_text("{ half")  # a broken cache is as good as none
    wrap(Plain())
    assert len(checks) == 4


def test_training_works_with_an_unwritable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """V8."""
    monkeypatch.setenv("VARUNA_CACHE", "/proc/nowhere")
    assert wrap(Plain()).plan.depth == 1


def test_a_stage_without_weights_still_takes_an_optimizer(pool: Pool) -> None:
    """V15: the third stage of this model only pools."""
    shared = {"batch": 4, "chunk": 2, "steps": 2}
    found = pool.run(train, 4, "Conv", 4, 1, spans=[(0, 1), (1, 2), (2, 3), (3, 4)], **shared)
    assert found[2]["parameters"] == ["varuna_placeholder"]
    compare(found[0], train_plainly("Conv", **shared), rtol=1e-5, atol=1e-6)


class FrozenFront(Plain):
    """Nothing is learned in the first segment."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.layers[0].requires_grad_(False)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_frozen_first_stage_trains_the_rest(pool: Pool, depth: int) -> None:
    """V3: values that need no gradient get none back."""
    torch.manual_seed(0)
    plain = FrozenFront()
    plain(**sample(4)).backward()
    for gradients in pool.run(frozen_front, depth, depth):
        assert gradients.keys() == {n for n, p in plain.named_parameters() if p.requires_grad}
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def frozen_front(depth: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    wrapped = wrap(FrozenFront(), mapping=stage_map(depth, 1), from_cache=False)
    wrapped.set_optimizer(make_optimizer("sgd", wrapped.parameters()))
    wrapped.step(sample(4))
    parts = wrapped._session.gather(
        {n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None}, dict[str, torch.Tensor]
    )
    wrapped.close()
    return {name: gradient for part in parts for name, gradient in part.items()}


def test_an_argument_that_forward_does_not_take_is_named() -> None:
    """V7."""
    with pytest.raises(ValueError, match=r"Plain.forward cannot be called.*'z'"):
        wrap(dummy_inputs={**sample(), "z": torch.ones(2)})
    with pytest.raises(ValueError, match="missing a required argument: 'y'"):
        wrap(dummy_inputs={"x": torch.ones(2, 7)})


class Takes(Plain):
    """Takes anything by name, as models of Hugging Face do."""

    def forward(self, **inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs["x"], inputs["y"]) * inputs["scale"].mean()


def test_what_forward_takes_by_kwargs_is_an_input_like_any_other() -> None:
    """V12."""
    model, inputs = Takes(), {**sample(4), "scale": torch.full((4,), 3.0)}
    wrapped = wrap(model, dummy_inputs=inputs)
    assert wrapped.evaluate(inputs) == pytest.approx(model(**inputs).item())


def test_an_error_at_run_time_names_the_line_of_the_model() -> None:
    """V7: of the many that make up a stage."""
    wrapped = Varuna(make_model("GPT"), "0;", make_inputs("GPT", 2, torch.Generator()), 4, 2, device="cpu")
    inputs = make_inputs("GPT", 4, torch.Generator())
    inputs["tokens"][1] += 10_000
    with pytest.raises(IndexError) as raised:
        wrapped.evaluate(inputs)
    assert "self.embed(" in str(raised.value.__notes__)


def test_one_rank_of_several_does_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """V9: torchrun, and the map that a script has for one process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match=r"does not name ranks \[1\].*'0,1;' for data parallelism, '0;1;' for a"
    ):
        wrap()


def test_stages_that_are_given_different_samples_are_refused(pool: Pool) -> None:
    """V7: loaders with different shuffles would pair one sample's features with another's label."""
    for message in pool.run(shuffled_apart, 2):
        assert "sample 0 of the batch differs between stages 0 and 1" in message


def shuffled_apart() -> str:
    import torch.distributed as dist

    wrapped = wrap(mapping="0;1;")
    wrapped.set_optimizer(make_optimizer("sgd", wrapped.parameters()))
    with pytest.raises(ValueError) as refused:
        wrapped.step(make_inputs("Plain", 4, torch.Generator().manual_seed(dist.get_rank())))
    wrapped.close()
    return str(refused.value)


@pytest.mark.parametrize("mapping", ["0,1;", "0,2;1,3;"])
def test_replicas_with_the_same_samples_get_a_warning(pool: Pool, mapping: str) -> None:
    """V7: once, and none where each has its own."""
    ranks = mapping.count(",") * 2
    assert sum(pool.run(warnings_of_given_alike, ranks, mapping, True), 0) == 1
    assert sum(pool.run(warnings_of_given_alike, ranks, mapping, False), 0) == 0


def warnings_of_given_alike(mapping: str, alike: bool) -> int:
    wrapped = wrap(mapping=mapping)
    wrapped.set_optimizer(make_optimizer("sgd", wrapped.parameters()))
    seed = 0 if alike else wrapped.rank_within_stage
    with logged() as told:
        for _ in range(2):
            wrapped.step(make_inputs("Plain", 2, torch.Generator().manual_seed(seed)))
    wrapped.close()
    return sum("replicas 0 and 1 were given the same samples" in line for line in told)
