"""Recognises models with adapters of peft, whose other weights are a frozen base, without importing peft."""

import sys

from torch import nn

from varuna.errors import CaptureError


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft has added adapters to the model, by `get_peft_model` or in place."""
    if "peft" not in sys.modules:
        return False
    return hasattr(model, "peft_config") or any(map(is_adapter_layer, model.modules()))


def is_adapter_layer(module: nn.Module) -> bool:
    """Return whether a module wraps another one and holds its adapters, such as peft's lora.Linear."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def base_names(model: nn.Module) -> frozenset[str]:
    """Return the names of all tensors that belong to the base of a model with adapters.

    These are frozen parameters, and the buffers of modules that are not peft's.
    """
    if not has_adapters(model):
        return frozenset()
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    for path, module in model.named_modules(remove_duplicate=False):
        if not type(module).__module__.startswith("peft."):
            frozen |= {f"{path}.{leaf}" if path else leaf for leaf in module._buffers}
    return frozenset(frozen)


UNSUPPORTED = {
    "ADALORA": "gives its weights other ranks while it trains (update_and_allocate), and a captured model "
    "has fixed ones. Use peft.LoraConfig, with rank_pattern= for ranks that differ between layers.",
    "CPT": "decides by the tokens of a batch which parts of its prompt it projects, and a captured model "
    "takes one path. Use peft.PromptTuningConfig.",
    "FROD": "reads the sizes of its weights from a tensor in each forward, and a captured model has fixed "
    "ones. Use peft.VeraConfig or peft.LoraConfig.",
}
"""Methods of peft that cannot be captured, by their type: what they do, and what to use instead."""


def refuse_changing_adapters(model: nn.Module) -> None:
    """Refuse methods that change the shapes or the use of adapters from step to step."""
    configs = getattr(model, "peft_config", None) if "peft" in sys.modules else None
    for name, config in dict(configs or {}).items():
        kind = str(getattr(getattr(config, "peft_type", None), "value", ""))
        if kind in UNSUPPORTED:
            raise CaptureError(
                f"the adapter {name!r} is {type(config).__name__.removesuffix('Config')} of peft. It "
                f"{UNSUPPORTED[kind]}"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise CaptureError(
                f"the adapter {name!r} is an activated LoRA (alora_invocation_tokens), which searches each "
                "sample for these tokens in a loop. Use LoraConfig without alora_invocation_tokens."
            )
