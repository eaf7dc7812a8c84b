"""Models with adapters of peft train, save and export at every layout as in one process."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.hf.adapters import (
    BATCH,
    SEED,
    make_adapted,
    make_config,
    make_optimizer,
    train_plain,
    train_rannc,
    train_steps,
    train_wrapped,
    wrap_adapted,
)
from tests.hf.models import make_batch, make_model
from tests.pool import Pool
from varuna import wrap
from varuna.errors import CaptureError, CheckpointError
from varuna.execute.comm.link import PeerLink
from varuna.hf import save_adapter, save_pretrained
from varuna.hf.adapters import load_adapter

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare losses, and the values of all weights."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["state"].keys() <= expected["state"].keys()
    for key, value in found["state"].items():
        torch.testing.assert_close(value, expected["state"][key], rtol=1e-3, atol=1e-5, msg=key)


def test_lora_trains_as_one_process_at_every_layout(pool: Pool) -> None:
    """TRA-2: 20 steps with dropout in the adapters; the base and unused weights stay."""
    expected = train_plain(make_adapted("lora", "gpt2"), "gpt2", 20)
    for depth, width in LAYOUTS:
        results = pool.run(train_wrapped, depth * width, "lora", "gpt2", depth, width, 20)
        assert results[0]["state"].keys() == expected["state"].keys()
        compare(results[0], expected)


METHODS = [
    ("dora", "llama"),
    ("tokens", "gpt2"),  # rows of a tied embedding
    ("loha", "llama"),
    ("vera", "llama"),  # all layers share two buffers
    ("prefix", "gpt2"),
    ("lora", "bert-head"),  # modules_to_save: the classifier
]


def train_methods(methods: list[tuple[str, str]], depth: int, width: int) -> list[dict[str, Any]]:
    return [train_wrapped(method, name, depth, width, 3) for method, name in methods]


def test_other_methods_train_as_one_process(pool: Pool) -> None:
    """TRA-2: DoRA, LoHa, VeRA, prefixes, whole modules and tokens beside LoRA."""
    for found, (method, name) in zip(
        pool.run(train_methods, 2, METHODS, 2, 1, timeout=300)[0], METHODS, strict=True
    ):
        expected = train_plain(make_adapted(method, name), name, 3)
        compare(found, expected)


def test_rannc_modules_train_adapters(pool: Pool, tmp_path: Path) -> None:
    """TRA-2: RaNNCModule in two stages."""
    expected = train_plain(make_adapted("lora", "gpt2"), "gpt2", 4)
    for result in pool.run(train_rannc, 2, "lora", "gpt2", 2, 4):
        compare(result, expected)


def save_half(store: str, out: str) -> dict[str, Any]:
    """Train 2 steps in two stages, save a checkpoint, train another step, and export."""
    model = make_adapted("lora", "gpt2", n_embd=64)
    wrapped = wrap_adapted(model, "gpt2", 2, 1, method="wide")
    wrapped.set_optimizer(make_optimizer(wrapped.parameters()))
    losses = train_steps(wrapped, "gpt2", 2, 1, range(2))
    wrapped.checkpoint(store)
    losses += train_steps(wrapped, "gpt2", 2, 1, range(2, 3))
    save_adapter(wrapped, out)
    with pytest.raises(CheckpointError, match="already exists"):
        save_adapter(wrapped, out)
    save_pretrained(wrapped, out, overwrite=True)
    whole = wrapped.gather_model()
    logits: list[Tensor] = []
    if whole is not None:
        inputs = make_batch("gpt2", 2)
        logits = [whole.eval()(**inputs).logits.detach()]
        logits.append(whole.merge_and_unload()(**inputs).logits.detach())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    wrapped.close()
    return {"losses": losses, "logits": logits, "trained": trained}


def resume_half(store: str, base: int) -> dict[str, Any]:
    """Continue on two replicas; the base comes with the model."""
    model = make_adapted("lora", "gpt2", base=base, n_embd=64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()  # the checkpoint has them
    wrapped = wrap_adapted(model, "gpt2", 1, 2, method="wide")
    wrapped.set_optimizer(make_optimizer(wrapped.parameters()))
    if base:
        with pytest.raises(CheckpointError, match=r"adapters of another base model: .*wte.weight"):
            wrapped.load_checkpoint(store)
        assert wrapped.load_checkpoint(store, strict=False) == 3
        wrapped.close()
        return {}
    assert wrapped.resume(store) == 2
    losses = train_steps(wrapped, "gpt2", 1, 2, range(2, 3))
    state = wrapped.full_state_dict()
    wrapped.checkpoint(store)  # after a load, still without the base
    wrapped.close()
    return {"losses": losses, "state": state}


def test_checkpoints_and_exports_have_adapters_only(pool: Pool, tmp_path: Path) -> None:
    """TRA-2: adapters and a constant; another layout continues; peft loads the export."""
    import peft

    store, out = str(tmp_path / "store"), str(tmp_path / "out")
    expected = train_plain(make_adapted("lora", "gpt2", n_embd=64), "gpt2", 3)
    found = pool.run(save_half, 2, store, out)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    (resumed, _) = pool.run(resume_half, 2, store, 0)
    assert resumed["losses"] == pytest.approx(expected["losses"][2:], rel=1e-5)
    compare({"losses": expected["losses"], "state": resumed["state"]}, expected)
    for step in (2, 3):
        folder = Path(store, f"varuna_ckpt_{step}")
        tensors = sum(os.path.getsize(file) for file in folder.glob("*.safetensors"))
        assert 3 * found["trained"] <= tensors < 3 * found["trained"] + 40_000  # Adam has two more values
    assert sorted(os.listdir(out)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(make_model("gpt2", n_embd=64), out).eval()
    logits = loaded(**make_batch("gpt2", 2)).logits.detach()
    torch.testing.assert_close(logits, found["logits"][0], rtol=0, atol=0)
    torch.testing.assert_close(found["logits"][1], logits, rtol=1e-4, atol=1e-5)  # merged
    pool.run(resume_half, 2, store, 1)


@pytest.mark.parametrize(("method", "name"), [("shira", "llama"), ("vblora", "gpt2")])
def test_adapters_whose_files_have_more_than_weights_are_loaded(
    method: str, name: str, tmp_path: Path
) -> None:
    """TRA-2: SHiRA's files have the places of its weights, VB-LoRA's a bank that all layers share."""
    wrapped = wrap_adapted(make_adapted(method, name), name, 1, 1)
    trained = {name: value for name, value in wrapped.named_parameters() if value.requires_grad}
    before = {name: value.detach().clone() for name, value in trained.items()}
    save_adapter(wrapped, tmp_path)
    with torch.no_grad():
        for value in trained.values():
            value.zero_()
    load_adapter(wrapped, tmp_path)
    torch.testing.assert_close(trained, before, rtol=0, atol=0)
    wrapped.close()


def test_adapters_at_other_places_are_refused(tmp_path: Path) -> None:
    """TRA-2: a file of SHiRA whose weights belong to other places of the base."""
    save_adapter(wrap_adapted(make_adapted("shira", "llama"), "llama", 1, 1), tmp_path)
    other = make_adapted("shira", "llama")
    for module in other.modules():
        for places in getattr(module, "shira_indices", {}).values():
            places.copy_(places.flip(1))
    wrapped = wrap_adapted(other, "llama", 1, 1)
    with pytest.raises(CheckpointError, match=r"shira_indices.* is not that of the model"):
        load_adapter(wrapped, tmp_path)
    wrapped.close()


def train_last_layer(depth: int, face: str) -> dict[str, Any]:
    """Train adapters of the last layer only, with optimizers as people make them."""
    if face == "rannc":
        return train_rannc("last", "gpt2", depth, 3)
    model = make_adapted("last", "gpt2")
    trained = [p for p in model.parameters() if p.requires_grad]
    if face == "wrap":
        options: dict[str, Any] = {"batch_size": BATCH, "stages": depth, "device": "cpu", "seed": SEED}
        wrapped = wrap(model, make_optimizer(trained), sample=make_batch("gpt2", 2), **options)
    else:
        wrapped = wrap_adapted(model, "gpt2", depth, 1, method="last")
        wrapped.set_optimizer(make_optimizer([p for p in wrapped.parameters() if p.requires_grad]))
    with patch.object(PeerLink, "send", autospec=True, side_effect=PeerLink.send) as send:
        losses = train_steps(wrapped, "gpt2", depth, 1, range(3))
    upstream = [call.args[1] for call in send.call_args_list if call.args[0].peer < wrapped.rank]
    assert bool(upstream) is (wrapped.stage > 0)
    assert not any(upstream)  # no gradients return to stages that do not train
    assert any(p.numel() for p in wrapped.parameters() if p.requires_grad) is (wrapped.stage == depth - 1)
    norm = float(torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0))  # zeroed: no rank hangs
    state, shares = wrapped.full_state_dict(), [p for p in wrapped.parameters() if p.requires_grad]
    wrapped.close()
    assert norm == 0 and shares
    return {"losses": losses, "state": state}


@pytest.mark.parametrize("face", ["varuna", "wrap", "rannc"])
def test_stages_without_a_trained_parameter(pool: Pool, face: str) -> None:
    """TRA-2: the first stages have nothing to train; their optimizer is made as on all other ranks."""
    expected = train_plain(make_adapted("last", "gpt2"), "gpt2", 3)
    for result in pool.run(train_last_layer, 3, 3, face):
        compare(result, expected)


def switch_adapters(depth: int) -> dict[str, Any]:
    """Evaluate without adapters and with another one; try to train so."""
    model = make_adapted("lora", "gpt2")
    model.add_adapter("other", make_config("lora", "gpt2"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".other." in name:
                parameter.add_(0.05)
    wrapped = wrap_adapted(model, "gpt2", depth, 1)
    wrapped.set_optimizer(make_optimizer(wrapped.parameters()))
    train_steps(wrapped, "gpt2", depth, 1, range(1))
    inputs, whole, found = make_batch("gpt2", BATCH), wrapped.gather_model(), {}
    with model.disable_adapter():
        found["off"] = wrapped.evaluate(inputs)
    found["on"] = wrapped.evaluate(inputs)
    if whole is not None:
        with torch.no_grad():
            found["plain on"] = float(whole.eval()(**inputs).loss)
            with whole.disable_adapter():
                found["plain off"] = float(whole(**inputs).loss)
            whole.set_adapter("other")
            found["plain other"] = float(whole(**inputs).loss)
    model.set_adapter("other")
    try:
        found["other"] = wrapped.evaluate(inputs)
        wrapped.step(inputs)
    except Exception as error:
        found["error"] = str(error)
    return found


def test_adapters_that_are_switched(pool: Pool) -> None:
    """TRA-2: evaluation without adapters works; training with other adapters is refused by name."""
    for depth in (1, 2):
        found = pool.run(switch_adapters, depth, depth)[0]
        assert found["on"] == pytest.approx(found["plain on"], rel=1e-6)
        assert found["off"] == pytest.approx(found["plain off"], rel=1e-6)
        assert "adapter" in found["error"] and "lora_A" in found["error"]
        if depth == 1:
            assert found["other"] == pytest.approx(found["plain other"], rel=1e-6)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("adalora", r"'default' is AdaLora of peft.*LoraConfig"),
        ("frod", r"'default' is Frod of peft.*VeraConfig"),
        ("cpt", r"'default' is CPT of peft.*PromptTuningConfig"),
        ("alora", r"alora_invocation_tokens"),
    ],
)
def test_methods_that_are_refused(method: str, named: str) -> None:
    """TRA-2: methods that change with the step or the data are refused by their name."""
    with pytest.raises(CaptureError, match=named):
        wrap_adapted(make_adapted(method, "llama"), "llama", 1, 1)


def train_in_float64(methods: list[str]) -> list[dict[str, Any]]:
    found = []
    for method in methods:
        wrapped = wrap_adapted(make_adapted(method, "gpt2").double(), "gpt2", 2, 1)
        wrapped.set_optimizer(make_optimizer(wrapped.parameters()))
        losses = train_steps(wrapped, "gpt2", 2, 1, range(3))
        found.append({"losses": losses, "state": wrapped.full_state_dict()})
        wrapped.close()
    return found


def test_adapters_in_float64(pool: Pool) -> None:
    """TRA-2: LoRA, and RandLoRA, whose fp32 results differ by 2e-3: that is rounding, as fp64 shows."""
    methods = ["lora", "randlora"]
    for method, found in zip(methods, pool.run(train_in_float64, 2, methods)[0], strict=True):
        expected = train_plain(make_adapted(method, "gpt2").double(), "gpt2", 3)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)  # transformers: in fp32
        for key, value in expected["state"].items():
            torch.testing.assert_close(found["state"][key], value, rtol=1e-9, atol=1e-10, msg=key)
