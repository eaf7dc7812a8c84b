"""LoRA over int8 weights of torchao, in one process and over workers: prints their losses as JSON.

A process of its own runs this, with torchao on its path.
"""

import json
import sys
import warnings
from typing import Any

import peft
import torch
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from tests.hf.adapters import make_optimizer, train_plain, train_steps, wrap_adapted
from tests.hf.models import make_model
from tests.pool import Pool
from varuna import wrap
from varuna.errors import CaptureError

STEPS = 3
warnings.filterwarnings("ignore", message="TorchaoLoraLinear was instantiated without")


def make_adapted() -> Any:
    """Quantize all linear layers but the head, as transformers does with TorchAoConfig."""
    torch.manual_seed(3)
    base = make_model("llama", hidden_size=64, intermediate_size=96)
    quantize_(base, Int8WeightOnlyConfig(), lambda m, name: isinstance(m, nn.Linear) and "head" not in name)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"], r=4, lora_dropout=0.2
    )
    model: Any = peft.get_peft_model(base, config)
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    return model.train()


def train_adapted(depth: int, width: int) -> list[float]:
    model = make_adapted()
    wrapped = wrap_adapted(model, "llama", depth, width, method="torchao lora")
    wrapped.set_optimizer(make_optimizer(wrapped.parameters()))
    losses = train_steps(wrapped, "llama", depth, width, range(STEPS))
    wrapped.close()
    return losses


class RoundedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False).requires_grad_(False)
        self.head = nn.Linear(64, 1)
        quantize_(self.layer, Int8DynamicActivationInt8WeightConfig())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)).mean()


def refusal_of_rounded_inputs() -> str:
    model = RoundedInputs()
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    try:
        wrap(model, optimizer, batch_size=2, sample={"x": torch.randn(2, 64)}, device="cpu")
    except CaptureError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    pool = Pool()
    try:
        found = {
            "plain": train_plain(make_adapted(), "llama", STEPS)["losses"],
            "2x1": pool.run(train_adapted, 2, 2, 1, timeout=300)[0],
            "1x2": pool.run(train_adapted, 2, 1, 2, timeout=300)[0],
            "refusal": refusal_of_rounded_inputs(),
        }
    finally:
        pool.close()
    print(json.dumps(found), file=sys.stdout)
