"""Models with adapters of peft, and their training in one process and over ranks."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyrannc import RaNNCModule
from tests.hf.models import make_batch, make_model
from tests.tasks import remembering, stage_map
from varuna import Varuna, cut_after, get_this_rank_config_varuna, plain_randomness

BATCH, SEED = 6, 7
BLOCKS = {"gpt2": "transformer.h.*", "llama": "model.layers.*", "bert-head": "bert.encoder.layer.*"}
TARGETS = {
    "gpt2": ["c_attn", "c_fc"],
    "llama": ["q_proj", "v_proj", "up_proj"],
    "bert-head": ["query", "dense"],
}
EMBEDDING = {"gpt2": "wte", "llama": "embed_tokens", "bert-head": "word_embeddings"}
PROMPTS = ("prompt", "p-tuning", "prefix")


def make_config(method: str, name: str) -> Any:
    import peft

    targets = TARGETS[name]
    task: dict[str, Any] = {"task_type": "SEQ_CLS" if name == "bert-head" else "CAUSAL_LM"}
    on: dict[str, Any] = {**task, "target_modules": targets}

    def lora(**changes: Any) -> Any:
        options = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.2, "fan_in_fan_out": name == "gpt2"}
        return peft.LoraConfig(**{**on, **options, **changes})

    makers: dict[str, Callable[[], Any]] = {
        "lora": lora,
        "dora": lambda: lora(use_dora=True),
        "rslora": lambda: lora(use_rslora=True, bias="lora_only"),
        "pissa": lambda: lora(init_lora_weights="pissa"),
        "head": lambda: lora(modules_to_save=["lm_head"]),
        "embedding": lambda: lora(target_modules=[*targets, EMBEDDING[name]]),
        "tokens": lambda: lora(trainable_token_indices=[3, 5, 7]),
        "last": lambda: lora(layers_to_transform=[3]),
        "loha": lambda: peft.LoHaConfig(**on, r=3),
        "lokr": lambda: peft.LoKrConfig(**on, r=3),
        "ia3": lambda: peft.IA3Config(**{**on, "target_modules": targets[:2]}, feedforward_modules=[]),
        "vera": lambda: peft.VeraConfig(**{**on, "target_modules": targets[:1]}, r=4, vera_dropout=0.2),
        "prompt": lambda: peft.PromptTuningConfig(**task, num_virtual_tokens=3),
        "p-tuning": lambda: peft.PromptEncoderConfig(**task, num_virtual_tokens=3, encoder_hidden_size=16),
        "prefix": lambda: peft.PrefixTuningConfig(**task, num_virtual_tokens=3),
        "adalora": lambda: peft.AdaLoraConfig(**on, total_step=10, init_r=4, target_r=2),
        "oft": lambda: peft.OFTConfig(**on, oft_block_size=4),
        "boft": lambda: peft.BOFTConfig(**on, boft_block_size=4),
        "norms": lambda: peft.LNTuningConfig(**task),
        "fourier": lambda: peft.FourierFTConfig(**on, n_frequency=20),
        "hra": lambda: peft.HRAConfig(**on),
        "vblora": lambda: peft.VBLoRAConfig(**on, num_vectors=8, vector_length=8, r=2, topk=2),
        "randlora": lambda: peft.RandLoraConfig(**on, r=4, fan_in_fan_out=name == "gpt2"),
        "miss": lambda: peft.MissConfig(**on, r=4),
        "shira": lambda: peft.ShiraConfig(**on, r=2),
        "c3a": lambda: peft.C3AConfig(**on, block_size=8),
        "road": lambda: peft.RoadConfig(**on, group_size=8),
        "frod": lambda: peft.FrodConfig(**on),
        "cpt": lambda: peft.CPTConfig(
            **task, cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]
        ),
        "alora": lambda: lora(alora_invocation_tokens=[3]),
        "adaption": lambda: peft.AdaptionPromptConfig(**task, adapter_len=3, adapter_layers=2),
    }
    return makers[method]()


def make_adapted(method: str, name: str, *, base: int = 0, **changes: Any) -> Any:
    """Return a model with adapters whose values are random: zeros would hide a mistake.

    `base` other than 0 gives the base other values.
    """
    import peft

    if method in PROMPTS:
        changes = {("n_positions" if name == "gpt2" else "max_position_embeddings"): 16, **changes}
    plain = make_model(name, **({"num_labels": 3} if name == "bert-head" else {}), **changes)
    if base:
        with torch.no_grad():
            next(plain.parameters()).add_(base)
    torch.manual_seed(3)
    model = peft.get_peft_model(plain, make_config(method, name))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.train()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train_plain(model: nn.Module, name: str, steps: int) -> dict[str, Any]:
    """Train the whole batch in one process."""
    optimizer, losses = make_optimizer(model.parameters()), []
    for step in range(steps):
        with plain_randomness(seed=SEED, step=step, batch_size=BATCH):
            loss = model(**make_batch(name, BATCH, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "state": {k: v.detach().clone() for k, v in model.state_dict().items()}}


def share(inputs: dict[str, Tensor], replica: int, width: int) -> dict[str, Tensor]:
    size = BATCH // width
    return {key: value[replica * size : (replica + 1) * size] for key, value in inputs.items()}


def own_replica(depth: int, width: int) -> int:
    return get_this_rank_config_varuna(stage_map(depth, width), dist.get_rank())[1]


def wrap_adapted(
    model: Any, name: str, depth: int, width: int, *, method: str | None = None, **options: Any
) -> Varuna:
    cut_after(model.get_base_model(), BLOCKS[name])
    mapping, sample = stage_map(depth, width), make_batch(name, 2)
    with nullcontext() if method is None else remembering(("adapted", method, name)):
        return Varuna(model, mapping, sample, BATCH, 2, device="cpu", seed=SEED, **options)


def train_steps(wrapped: Varuna, name: str, depth: int, width: int, steps: range) -> list[float]:
    optimizer, losses, replica = wrapped.optimizer, [], own_replica(depth, width)
    assert optimizer is not None
    for step in steps:
        loss, _ = wrapped.step(share(make_batch(name, BATCH, step), replica, width))
        optimizer.step()
        wrapped.zero_grad()
        losses.append(loss)
    return losses


def train_wrapped(
    method: str, name: str, depth: int, width: int, steps: int, **options: Any
) -> dict[str, Any]:
    model = make_adapted(method, name)
    wrapped = wrap_adapted(model, name, depth, width, method=method, **options)
    wrapped.set_optimizer(make_optimizer(wrapped.parameters()))
    losses = train_steps(wrapped, name, depth, width, range(steps))
    state = wrapped.full_state_dict()
    wrapped.close()
    return {"losses": losses, "state": state}


def train_rannc(method: str, name: str, depth: int, steps: int) -> dict[str, Any]:
    """Train with `RaNNCModule`; it takes this rank's share and reduces gradients itself."""
    model = make_adapted(method, name)
    optimizer = make_optimizer(p for p in model.parameters() if p.requires_grad)
    wrapped = RaNNCModule(model, optimizer, device="cpu", partition_num=depth, seed=SEED)
    rank, width, losses = dist.get_rank(), dist.get_world_size(), []
    for step in range(steps):
        loss = wrapped(**share(make_batch(name, BATCH, step), rank, width)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = wrapped.state_dict()
    wrapped.undeploy()
    return {"losses": losses, "state": state}
