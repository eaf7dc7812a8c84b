"""LoRA over a base of 4-bit weights (QLoRA) trains, saves and exports as in one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch import nn

from pyrannc import RaNNCModule
from tests.environments import environment
from tests.hf.adapters import BATCH, SEED, make_optimizer, train_plain, train_steps, wrap_adapted
from tests.hf.models import make_batch, make_model
from tests.pool import ROOT, Pool
from varuna import wrap
from varuna.errors import CaptureError
from varuna.hf import save_adapter


def four_bits(model: nn.Module, *, nested: bool = True) -> nn.Module:
    """Quantize all linear layers but the head, as transformers does with load_in_4bit."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "head" not in name:
            made = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                module.bias is not None,
                compute_dtype=torch.float32,
                compress_statistics=nested,
                quant_type="nf4",
            )
            made.load_state_dict(module.state_dict())
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, made.to("cpu"))
    vars(model)["is_loaded_in_4bit"] = True  # peft asks for it
    return model


def quantized_base(*, nested: bool = True) -> nn.Module:
    return four_bits(make_model("llama", hidden_size=64, intermediate_size=96), nested=nested)


def make_quantized(method: str = "lora", *, nested: bool = True) -> Any:
    torch.manual_seed(3)
    base = quantized_base(nested=nested)
    options: dict[str, Any] = {"r": 4, "lora_dropout": 0.2, "use_dora": method == "dora"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], **options)
    model: Any = peft.get_peft_model(base, config)
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return model.train()


def train_quantized(method: str, depth: int, width: int, out: str = "") -> dict[str, Any]:
    """Train 4 steps; save a checkpoint after two, and the adapters at the end."""
    model = make_quantized(method)
    wrapped = wrap_adapted(model, "llama", depth, width, method=f"nf4 {method}")
    wrapped.set_optimizer(make_optimizer(wrapped.parameters()))
    losses = train_steps(wrapped, "llama", depth, width, range(2))
    found: dict[str, Any] = {"trained": sum(p.nbytes for p in wrapped.parameters() if p.requires_grad)}
    if out:
        wrapped.checkpoint(f"{out}/store")
    losses += train_steps(wrapped, "llama", depth, width, range(2, 4))
    if out:
        save_adapter(wrapped, f"{out}/adapter")
        whole = wrapped.gather_model()
        if whole is not None:
            layer = whole.get_base_model().model.layers[0].mlp.up_proj.base_layer
            assert type(layer) is bnb.nn.Linear4bit and type(layer.weight) is bnb.nn.Params4bit
            with torch.no_grad():
                found["loss"] = float(whole.train()(**make_batch("llama", 2)).loss)
            whole.merge_and_unload()
    wrapped.close()
    return {**found, "losses": losses}


@pytest.mark.parametrize(("method", "layouts"), [("lora", [(2, 1), (1, 2), (2, 2)]), ("dora", [(2, 1)])])
def test_quantized_bases_train_as_one_process(
    method: str, layouts: list[tuple[int, int]], pool: Pool
) -> None:
    """TRA-2: LoRA and DoRA over NF4 weights whose scales are quantized, too."""
    expected = train_plain(make_quantized(method), "llama", 4)
    for depth, width in layouts:
        found = pool.run(train_quantized, depth * width, method, depth, width)[0]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5), (depth, width)


def resume_quantized(store: str) -> list[float]:
    wrapped = wrap_adapted(make_quantized(), "llama", 1, 2, method="nf4 lora")
    wrapped.set_optimizer(make_optimizer(wrapped.parameters()))
    assert wrapped.resume(store) == 2
    losses = train_steps(wrapped, "llama", 1, 2, range(2, 4))
    wrapped.close()
    return losses


def test_checkpoints_and_exports_of_quantized_bases(pool: Pool, tmp_path: Path) -> None:
    """TRA-2: a checkpoint has the adapters, continues at another layout, and the export is peft's."""
    plain = make_quantized()
    expected = train_plain(plain, "llama", 4)["losses"]
    parts = pool.run(train_quantized, 2, "lora", 2, 1, str(tmp_path))
    trained = sum(part["trained"] for part in parts)
    files = (tmp_path / "store" / "varuna_ckpt_2").glob("*.safetensors")
    assert 3 * trained <= sum(os.path.getsize(file) for file in files) < 3 * trained + 40_000
    assert pool.run(resume_quantized, 2, str(tmp_path / "store"))[0] == pytest.approx(expected[2:], rel=1e-5)
    loaded = peft.PeftModel.from_pretrained(quantized_base(), str(tmp_path / "adapter")).train()
    with torch.no_grad():
        loss = float(loaded(**make_batch("llama", 2)).loss)
    assert loss == pytest.approx(parts[0]["loss"], rel=1e-6)


def test_rannc_and_plain_use_of_a_quantized_base() -> None:
    """TRA-2: RaNNCModule trains it; the script's own model still computes, saves and merges as before."""
    expected = train_plain(make_quantized(), "llama", 2)
    model = make_quantized()
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    wrapped, losses = RaNNCModule(model, optimizer, device="cpu", seed=SEED), []
    for step in range(2):
        loss = wrapped(**make_batch("llama", BATCH, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    wrapped.undeploy()
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
    plain = make_quantized()
    before = plain.state_dict()
    sample = make_batch("llama", 2)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        loss = plain(**sample).loss
    wrap(plain, make_optimizer(plain.parameters()), batch_size=2, sample=sample, device="cpu").close()
    assert before.keys() == plain.state_dict().keys()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        torch.testing.assert_close(plain(**sample).loss, loss)
    plain.merge_and_unload()


class Quantized8bit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = bnb.nn.Linear8bitLt(8, 8, has_fp16_weights=False).to("cpu")
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)).mean()


def test_quantized_layers_that_are_refused() -> None:
    """TRA-2: 8 bits, whose results depend on the micro-batch; 4-bit layers without values."""
    sample = {"x": torch.randn(2, 8)}
    model = Quantized8bit()
    with pytest.raises(CaptureError, match=r"'layer' is a Linear8bitLt.*load_in_4bit"):
        wrap(model, torch.optim.SGD(model.head.parameters(), 0.1), batch_size=2, sample=sample, device="cpu")
    model.layer = bnb.nn.Linear4bit(8, 8)
    with pytest.raises(CaptureError, match=r"'layer' has 4-bit weights.*model.to"):
        wrap(model, torch.optim.SGD(model.head.parameters(), 0.1), batch_size=2, sample=sample, device="cpu")


def test_torchao_bases_train_as_one_process() -> None:
    """TRA-2: int8 weights of torchao at two layouts; layers that round their inputs are refused."""
    folder = environment("torchao", Path(__file__).with_name("torchao-constraints.txt"))
    (packages,) = folder.glob("lib/python*/site-packages")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(packages)]).strip(os.pathsep)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.hf.torchao_bases"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    for layout in ("2x1", "1x2"):
        assert found[layout] == pytest.approx(found["plain"], rel=1e-5), layout
    assert re.search(r"'layer' rounds its inputs.*Int8WeightOnlyConfig", found["refusal"])
