"""Features of transformers' Trainer and trl that VarunaTrainer refuses, each by its name."""

import contextlib
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.hf.trainers import arguments, language_model, prompts, sentences, sft_arguments, tokenizer
from tests.pool import Pool
from varuna.hf import VarunaTrainer, empty_model, hf_weights
from varuna.hf.trainer.refusals import REFUSED_FIELDS, UnsupportedFeature

FIELDS: dict[str, Any] = {
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "fsdp": "full_shard",
    "parallelism_config": object(),
    "neftune_noise_alpha": 5.0,
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
    "fp16_full_eval": True,
    "bf16_full_eval": True,
    "enable_jit_checkpoint": True,
    "save_on_each_node": True,
    "torch_empty_cache_steps": 2,
    "activation_offloading": True,
    "padding_free": True,
    "optim": "galore_adamw",
    "torch_compile_mode": "max-autotune",
    "torch_compile_backend": "eager",
    "debug": ["underflow_overflow"],
}
"""Fields of TrainingArguments and SFTConfig that are refused, with values that people use."""
OF_SFT = ("padding_free", "activation_offloading")
OF_TRL = ("DPOTrainer", "RewardTrainer", "GRPOTrainer")


@pytest.mark.parametrize("name", FIELDS)
def test_an_argument_that_does_not_work_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """TRA-1"""
    import trl

    args = sft_arguments(tmp_path) if name in OF_SFT else arguments(tmp_path)
    setattr(args, name, FIELDS[name])  # transformers itself refuses some of them on this machine
    kind: Any = VarunaTrainer
    options: dict[str, Any] = {"train_dataset": sentences(4)}
    if name in OF_SFT:
        kind = type("Staged", (VarunaTrainer, trl.SFTTrainer), {})
        options = {"train_dataset": prompts(4, 1), "processing_class": tokenizer()}
    with pytest.raises(UnsupportedFeature, match=rf"{name}=.*\(.+\)"):
        kind(language_model(), args=args, **options)


def test_every_refused_field_has_a_test() -> None:
    """TRA-1"""
    assert set(REFUSED_FIELDS) <= set(FIELDS)


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ({"hf_device_map": {"wte": 0, "h": 1}}, "device_map over several devices"),
        ({"_tp_size": 2}, "DistributedConfig or tp_plan"),
    ],
)
def test_a_model_that_transformers_has_distributed_is_refused(
    attributes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """TRA-1"""
    model = language_model()
    vars(model).update(attributes)
    with pytest.raises(UnsupportedFeature, match=named):
        VarunaTrainer(model, arguments(tmp_path), train_dataset=sentences(4))


@pytest.mark.parametrize("name", OF_TRL)
def test_other_trainers_of_trl_are_refused(name: str, tmp_path: Path) -> None:
    """TRA-1"""
    import trl

    kind: Any = type("Staged", (VarunaTrainer, getattr(trl, name)), {})
    with pytest.raises(UnsupportedFeature, match=rf"{name} of trl.*SFTTrainer works"):
        kind(language_model(), args=arguments(tmp_path))


def test_other_losses_of_sft_are_refused(tmp_path: Path) -> None:
    """TRA-1"""
    import trl

    kind: Any = type("Staged", (VarunaTrainer, trl.SFTTrainer), {})
    args = sft_arguments(tmp_path, loss_type="dft")
    with pytest.raises(UnsupportedFeature, match=r"loss_type='dft'.*use 'nll'"):
        kind(language_model(), args=args, train_dataset=prompts(4, 1), processing_class=tokenizer())


def test_the_auxiliary_loss_of_experts_is_refused(tmp_path: Path) -> None:
    """TRA-1: trl computes it by its own forward; without the loss, experts train."""
    import trl

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1
    )
    kind: Any = type("Staged", (VarunaTrainer, trl.SFTTrainer), {})
    options = {"train_dataset": prompts(4, 1), "processing_class": tokenizer()}
    with pytest.raises(UnsupportedFeature, match=r"router_aux_loss_coef=0\.001.*router_aux_loss_coef=0\.0"):
        kind(transformers.MixtralForCausalLM(config), args=sft_arguments(tmp_path), **options)
    args = sft_arguments(tmp_path, router_aux_loss_coef=0.0)
    kind(transformers.MixtralForCausalLM(config), args=args, **options)


def doubled_forward(self: Any, **inputs: Any) -> Any:
    output = type(self).forward(self, **inputs)
    output.loss = 2 * output.loss
    return output


def test_a_forward_that_the_script_has_set_is_refused(tmp_path: Path) -> None:
    """TRA-1: it would not be called. accelerate's hooks, which call the forward of the class, are taken."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    args, rows = arguments(tmp_path), sentences(4)
    model = language_model()
    model.forward = types.MethodType(doubled_forward, model)
    with pytest.raises(UnsupportedFeature, match=r"replaced by doubled_forward.*model\.__class__ = MyModel"):
        VarunaTrainer(model, args, train_dataset=rows)
    VarunaTrainer(add_hook_to_module(language_model(), ModelHook()), args, train_dataset=rows)
    made = iter([language_model(), model])
    trainer = VarunaTrainer(model_init=lambda: next(made), args=arguments(tmp_path), train_dataset=rows)
    with pytest.raises(UnsupportedFeature, match="replaced by doubled_forward"):
        trainer.train()


def test_batches_of_one_long_row_are_refused(tmp_path: Path) -> None:
    """TRA-1"""
    collator = transformers.DataCollatorWithFlattening()
    with pytest.raises(UnsupportedFeature, match=r"DataCollatorWithFlattening.*collator that pads"):
        VarunaTrainer(
            language_model(), arguments(tmp_path), train_dataset=sentences(4), data_collator=collator
        )


def test_a_model_on_meta_resumes_from_stores_only(tmp_path: Path) -> None:
    """TRA-1, TRA-3: it would train on with the weights of `initialize=`, not those of the checkpoint."""
    source = str(tmp_path / "source")
    language_model().save_pretrained(source)
    options = {"initialize": hf_weights(source)}
    trainer = VarunaTrainer(
        empty_model(source), arguments(tmp_path), train_dataset=sentences(4), varuna_options=options
    )
    with pytest.raises(UnsupportedFeature, match=r"has no store of Varuna.*initialize=hf_weights"):
        trainer.train(resume_from_checkpoint=source)


@pytest.mark.parametrize("method", ["prompt", "topk"])
def test_prompts_without_their_weights_are_refused(method: str, tmp_path: Path) -> None:
    """TRA-1: peft's files have what the weights of a prompt encoder make, or the largest of VB-LoRA's."""
    import peft

    sizes = {"num_vectors": 8, "vector_length": 8, "r": 2, "topk": 2, "target_modules": ["c_attn"]}
    config: Any = peft.VBLoRAConfig(**sizes, save_only_topk_weights=True)
    if method == "prompt":
        config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=16)
    model: Any = peft.get_peft_model(language_model(), config)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    args = arguments(tmp_path, save_only_model=True, **best)
    with pytest.raises(UnsupportedFeature, match="save_only_model=True with load_best_model_at_end=True"):
        VarunaTrainer(model, args, train_dataset=sentences(4), eval_dataset=sentences(4))


def test_calls_that_do_not_work_are_refused(tmp_path: Path) -> None:
    """TRA-1: and predict before the model is cut along its loss."""
    trainer = VarunaTrainer(language_model(), arguments(tmp_path), train_dataset=sentences(4))
    with pytest.raises(UnsupportedFeature, match=r"hyperparameter_search.*one job for each trial"):
        trainer.hyperparameter_search()
    rows = [{"input_ids": row["input_ids"]} for row in sentences(4)]
    with pytest.raises(UnsupportedFeature, match=r"predict was called before train.*call evaluate\(\)"):
        trainer.predict(rows)


class GrokAdamW(torch.optim.SGD):
    """Stands for the class of optim="grokadamw"."""


def train_with_grokadamw(folder: str) -> str:
    model = language_model()
    chosen: Any = (GrokAdamW(model.parameters(), lr=0.1), None)
    trainer = VarunaTrainer(model, arguments(folder), train_dataset=sentences(8), optimizers=chosen, stages=2)
    try:
        trainer.train()
    except Exception as error:
        return str(error)
    return "trained"


def test_an_optimizer_that_needs_all_parameters_is_refused_over_stages(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(train_with_grokadamw, 2, str(tmp_path)):
        assert "GrokAdamW treats a parameter by its place among all" in found


@pytest.mark.parametrize("name", ["compute_loss_context_manager", "autocast_smart_context_manager"])
def test_methods_that_would_have_no_effect_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """TRA-1"""
    kind: Any = type("Own", (VarunaTrainer,), {name: lambda self: contextlib.nullcontext()})
    with pytest.raises(UnsupportedFeature, match=rf"{name} of Own.*\(.+\)"):
        kind(language_model(), arguments(tmp_path), train_dataset=sentences(4))


def test_fp8_of_accelerate_launch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRA-1"""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UnsupportedFeature, match=r"'fp8' of ACCELERATE_MIXED_PRECISION.*no, bf16, fp16"):
        VarunaTrainer(language_model(), arguments(tmp_path), train_dataset=sentences(4))
