"""Pretrains a small GPT-2: arguments, model and training loop are in other files, as in Megatron-LM."""

import signal

import torch
from language.arguments import get_args
from language.model import Gpt2
from language.training import on_demand_checkpoint, pretrain


def get_batch(iterator, device=None):
    """Return the inputs of the model; the attention mask is one for all samples."""
    (tokens,) = next(iterator)
    tokens = tokens if device is None else tokens.to(device)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.size(1)
    mask = torch.tril(torch.ones(1, 1, length, length, device=inputs.device)) < 0.5
    loss_mask = torch.ones(inputs.size(), dtype=torch.float, device=inputs.device)
    loss_mask[:, 0] = 0.0
    positions = torch.arange(length, device=inputs.device).unsqueeze(0).expand_as(inputs).contiguous()
    return {
        "input_ids": inputs,
        "position_ids": positions,
        "attention_mask": mask,
        "loss_mask": loss_mask,
        "labels": labels,
    }


def varuna_step(iterator, model):
    args = get_args()
    loss, overflow, global_norm = model.step(
        get_batch(iterator), clip_grad_max_norm=args.clip_grad, with_norm=True
    )
    loss = torch.Tensor([loss])
    return loss, {"lm loss": loss}, overflow, global_norm


def varuna_evaluate(iterator, model):
    inputs = get_batch(iterator)
    loss = model.evaluate(inputs, inputs["labels"].size(0))
    return loss, {"lm loss": torch.Tensor([loss])}


def forward_step(iterator, model):
    loss = model(**get_batch(iterator))
    return loss, {"lm loss": loss.detach()}


if __name__ == "__main__":

    def handler(signum, _):
        on_demand_checkpoint()

    if get_args().varuna:
        signal.signal(signal.SIGUSR1, handler)
    pretrain(Gpt2, forward_step, get_batch, varuna_step, varuna_evaluate)
