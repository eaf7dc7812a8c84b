"""Features of transformers' Trainer that do not work over pipeline stages: each is refused by name."""

import os
from typing import Any

import transformers

from varuna.hf.adapters import lacks_weights
from varuna.hf.trainer.captured_loss import package_of
from varuna.hf.trainer.one_process import PRECISIONS, given

LAYERWISE_OPTIMIZERS = ("galore", "lomo", "apollo", "layerwise", "grokadamw_layerwise", "q_apollo")
"""Parts of names of optimizers that need the whole model, or that step inside backward."""

FORWARD_PACKAGES = ("accelerate", "peft", "trl")
"""Packages that replace the forward of a model by one with the same loss."""

REFUSED_FIELDS = {
    "deepspeed": "Varuna distributes the model itself: remove it; shard_optimizer=True saves memory",
    "fsdp": "Varuna distributes the model itself: remove it, and use stages=",
    "parallelism_config": "there is no tensor, context or sequence parallelism: use stages=",
    "neftune_noise_alpha": "its noise would change with the layout: set it to None",
    "use_liger_kernel": "it replaces parts of the model by kernels that cannot be cut: set it to False",
    "auto_find_batch_size": "a rank cannot change the batch on its own: set per_device_train_batch_size",
    "fp16_full_eval": "evaluations run in the precision of the training: set it to False, or train with fp16",
    "bf16_full_eval": "evaluations run in the precision of the training: set it to False, or train with bf16",
    "enable_jit_checkpoint": "`varuna run` saves when machines leave: set it to False",
    "save_on_each_node": "all ranks write to one folder that all of them see: set it to False",
    "torch_empty_cache_steps": "the memory of a stage is kept between steps: set it to None",
    "activation_offloading": "use gradient_checkpointing=True, which recomputes activations",
    "padding_free": "a batch of one long row cannot be divided into micro-batches: set it to False",
}
"""Fields of TrainingArguments (and trl's SFTConfig) that must have no value, and the way out."""


REFUSED_METHODS = {
    "compute_loss_context_manager": "what it enters would apply when the loss is captured, not in each step: "
    "enter it in compute_loss",
    "autocast_smart_context_manager": "the stages run in their own autocast: choose bf16=True or fp16=True",
}
"""Methods of Trainer that a subclass must not override, and the way out."""


class UnsupportedFeature(ValueError):
    """A feature of Trainer that VarunaTrainer does not have."""


def refuse_arguments(args: Any) -> None:
    """Raise UnsupportedFeature for an argument that cannot be honoured."""
    for name, way_out in REFUSED_FIELDS.items():
        if getattr(args, name, None):
            raise UnsupportedFeature(
                f"{name}={getattr(args, name)!r} does not work with VarunaTrainer ({way_out})"
            )
    if debug := [str(getattr(option, "value", option)) for option in getattr(args, "debug", None) or ()]:
        raise UnsupportedFeature(
            f"debug={debug} does not work with VarunaTrainer (remove it; on_nan= of varuna_options names the "
            "stage and micro-batch of a loss that is not finite)"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if any(part in optim for part in LAYERWISE_OPTIMIZERS):
        raise UnsupportedFeature(
            f"optim={optim!r} needs the whole model on one rank (use adamw_torch, adafactor or another "
            "optimizer of parameters, and shard_optimizer=True in varuna_options to save memory)"
        )
    backend = getattr(args, "torch_compile_backend", None)
    if backend not in (None, "inductor"):
        raise UnsupportedFeature(
            f"torch_compile_backend={backend!r} is not supported (use inductor: torch_compile=True)"
        )
    if mode := getattr(args, "torch_compile_mode", None):
        raise UnsupportedFeature(
            f"torch_compile_mode={mode!r} is not supported (use torch_compile=True alone; cuda_graphs=True "
            "in varuna_options records CUDA graphs)"
        )
    if (precision := given(args, "mixed_precision")) not in PRECISIONS:
        raise UnsupportedFeature(
            f"mixed precision {precision!r} of ACCELERATE_MIXED_PRECISION, which `accelerate launch` sets, "
            f"is not supported (choose one of {', '.join(PRECISIONS)}, or set bf16=True or fp16=True)"
        )
    for variable in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            raise UnsupportedFeature(
                f"{variable} is set by `accelerate launch` (start the script with `varuna run` or torchrun)"
            )


def refuse_model(model: Any) -> None:
    """Raise UnsupportedFeature for a model that transformers has distributed itself."""
    places = getattr(model, "hf_device_map", None) or {}
    if len(set(places.values())) > 1:
        raise UnsupportedFeature(
            "the model was loaded with device_map over several devices (load it without device_map; each "
            "rank holds one stage; if trl loads it by its name, set model_init_kwargs={'device_map': None} "
            "in SFTConfig)"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False) or getattr(model, "_tp_size", None):
        raise UnsupportedFeature(
            "the model was loaded with a DistributedConfig or tp_plan (load it without; each rank holds one "
            "stage)"
        )
    patch = getattr(model, "__dict__", {}).get("forward")
    if patch is not None and package_of(patch) not in FORWARD_PACKAGES:
        name = getattr(patch, "__qualname__", type(patch).__name__)
        raise UnsupportedFeature(
            f"model.forward was replaced by {name}, which VarunaTrainer would not call (define it in a "
            "subclass, and give the model this class: model.__class__ = MyModel)"
        )


def refuse_kind(kind: type) -> None:
    """Raise UnsupportedFeature for a class whose steps are not those of Trainer or SFTTrainer."""
    kinds = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "trl"]
    if kinds and kinds[0].__name__ != "SFTTrainer":
        raise UnsupportedFeature(
            f"{kinds[0].__name__} of trl calls the model in ways that cannot be cut into stages (SFTTrainer "
            "works; for others, use pyrannc.RaNNCModule or trl's own parallelism)"
        )
    for name, way_out in REFUSED_METHODS.items():
        if getattr(kind, name) is not getattr(transformers.Trainer, name):
            raise UnsupportedFeature(
                f"{name} of {kind.__name__} does not work with VarunaTrainer ({way_out})"
            )


def refuse_trainer(trainer: Any) -> None:
    """Raise UnsupportedFeature for a combination of arguments that cannot be honoured."""
    args = trainer.args
    if getattr(trainer, "padding_free", False):  # trl sets it for this way of packing
        raise UnsupportedFeature(
            f"packing_strategy={args.packing_strategy!r} makes one long row of a batch, which cannot "
            "be divided into micro-batches (use packing_strategy='wrapped', or packing=False)"
        )
    if isinstance(trainer.data_collator, transformers.DataCollatorWithFlattening):
        raise UnsupportedFeature(
            "DataCollatorWithFlattening makes one long row of a batch, which cannot be divided into "
            "micro-batches (use a collator that pads, such as DataCollatorWithPadding or "
            "DataCollatorForLanguageModeling)"
        )
    if getattr(args, "loss_type", "nll") != "nll":
        raise UnsupportedFeature(f"loss_type={args.loss_type!r} is not supported (use 'nll')")
    if getattr(trainer, "aux_loss_enabled", False):  # trl's, for a mixture of experts
        raise UnsupportedFeature(
            f"router_aux_loss_coef={trainer.router_aux_loss_coef!r} is not supported: the loss that balances "
            "experts would depend on the micro-batches (set router_aux_loss_coef=0.0 in SFTConfig)"
        )
    needs_store = hasattr(trainer.model, "peft_config") and lacks_weights(trainer.model)
    if needs_store and args.load_best_model_at_end and args.save_only_model:
        raise UnsupportedFeature(
            "save_only_model=True with load_best_model_at_end=True is not supported for prompts and for "
            "VB-LoRA with save_only_topk_weights=True: their files lack the weights that make them (set "
            "save_only_model=False)"
        )


def refuse_stages(args: Any, num_stages: int) -> None:
    """Raise UnsupportedFeature for an argument that needs the whole model on each rank."""
    if num_stages > 1 and getattr(args, "predict_with_generate", False):
        raise UnsupportedFeature(
            f"predict_with_generate=True does not work over {num_stages} stages: a rank generates with the "
            "whole model only (set it to False, or use stages=1; trainer.gather_model() returns the whole "
            "model for generate)"
        )


def refuse_use(*_call: Any) -> None:
    """Raise UnsupportedFeature: a hook of a model that holds one of several stages."""
    raise UnsupportedFeature(
        "the model of a VarunaTrainer holds the stage of one rank, so it can neither be called nor saved by "
        "itself (use evaluate(), predict() and save_model() of the trainer; an own training_step or "
        "prediction_step must call super(); trainer.gather_model() returns the whole model)"
    )
