"""Everyday combinations of TrainingArguments: VarunaTrainer logs what transformers' Trainer logs."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import transformers as hf
from torch import nn

from tests.hf.trainers import (
    arguments,
    assert_same_logs,
    classifier,
    language_model,
    padded,
    prompts,
    sentences,
    sentences_with_classes,
    sft_arguments,
    tokenizer,
)
from tests.pool import Pool
from varuna.hf import VarunaTrainer, empty_model, hf_weights
from varuna.hf.trainer.one_process import own_device

BERT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TEXT: dict[str, Any] = {**BERT, "vocab_size": 64, "max_position_embeddings": 16}
EPOCHS: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
"""29 rows: the last batch of an epoch has one row, and the last update two batches."""

Case = Callable[[str], dict[str, Any]]
"""Takes the output folder; returns the arguments of a Trainer."""


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return make()


def token_rows(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"].tolist()} for row in sentences(count, lengths=(5, 12))]


def with_mask() -> Any:
    words = tokenizer()
    words.mask_token = "w61"
    return words


def mean_logit(predicted: Any) -> dict[str, float]:
    logits = predicted.predictions
    return {"mean": float(numpy.where(logits < -50, 0, logits).astype("float64").mean()), "rows": len(logits)}


def summed_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits, labels = outputs["logits"][:, :-1].reshape(-1, 64), labels[:, 1:].reshape(-1)
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


class ChangingCallback(hf.TrainerCallback):
    """Changes learning rates, asks for an evaluation, and stops after the third update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        control.should_training_stop = state.global_step == 3
        control.should_evaluate = state.global_step == 1
        for group in options["optimizer"].param_groups:
            group["lr"] *= 0.5


def length_groups(folder: str) -> dict[str, Any]:
    """Batches of similar lengths, Adafactor, tokens counted without padding."""
    return {
        "model": language_model(),
        "args": arguments(
            folder,
            max_steps=4,
            train_sampling_strategy="group_by_length",
            include_num_input_tokens_seen="non_padding",
            optim="adafactor",
        ),
        "train_dataset": sentences(44, lengths=(5, 12)),
        "data_collator": padded,
        "processing_class": tokenizer(),
    }


def evaluation_first(folder: str) -> dict[str, Any]:
    """Evaluations before the first update, of batches padded to other lengths, with metrics."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    return {
        "model": language_model(),
        "args": arguments(
            folder, max_steps=3, eval_accumulation_steps=1, per_device_eval_batch_size=4, **options
        ),
        "train_dataset": sentences(44, lengths=(7, 12)),
        "eval_dataset": {"a": sentences(10, 5, (5, 12)), "b": sentences(5, 6, (5, 12))},
        "data_collator": padded,
        "compute_metrics": mean_logit,
    }


def masked_words(folder: str) -> dict[str, Any]:
    """A collator that draws random masks, in training and in evaluations."""
    return {
        "model": seeded(lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT))),
        "args": arguments(folder, max_steps=4, eval_strategy="steps", eval_steps=2, data_seed=7),
        "train_dataset": token_rows(44),
        "eval_dataset": token_rows(10),
        "data_collator": hf.DataCollatorForLanguageModeling(with_mask(), mlm_probability=0.3),
    }


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(sentences(9, seed=5))


def plateau(folder: str) -> dict[str, Any]:
    """SGD with a schedule that follows the evaluation loss, of a stream whose last batch has one sample."""
    schedule = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}}
    optimizer = {"optim": "sgd", "warmup_steps": 0}
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss"}
    reader = {"accelerator_config": {"dispatch_batches": True}}
    return {
        "model": language_model(),
        "args": arguments(folder, max_steps=4, **optimizer, **schedule, **evaluation, **reader),
        "train_dataset": sentences(44),
        "eval_dataset": Stream(),
    }


def best_epoch(folder: str) -> dict[str, Any]:
    """Evaluations, saves and logs at the end of epochs; the best is loaded at the end."""
    strategies = {f"{name}_strategy": "epoch" for name in ("eval", "save", "logging")}
    return {
        "model": language_model(),
        "args": arguments(
            folder,
            **EPOCHS,
            **strategies,
            load_best_model_at_end=True,
            save_total_limit=1,
            save_only_model=True,
        ),
        "train_dataset": sentences(29),
        "eval_dataset": sentences(9, seed=5),
    }


def smoothed_incomplete(folder: str) -> dict[str, Any]:
    """Label smoothing, and an incomplete last update."""
    return {
        "model": language_model(),
        "args": arguments(folder, **EPOCHS, label_smoothing_factor=0.1, lr_scheduler_type="polynomial"),
        "train_dataset": sentences(29),
    }


def weighted_classes(folder: str) -> dict[str, Any]:
    """An own compute_loss with class weights: a mean that is divided by the weights of a batch."""
    rows = sentences_with_classes(29)
    return {
        "model": classifier(),
        "args": arguments(folder, **EPOCHS),
        "train_dataset": rows,
        "own_loss": True,
    }


def regression(folder: str) -> dict[str, Any]:
    """A mean squared error of one output, and an incomplete last update."""
    draw = torch.Generator().manual_seed(1)
    rows = [{**row, "labels": float(torch.randn((), generator=draw))} for row in sentences_with_classes(29)]
    model = seeded(lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=1)))
    return {"model": model, "args": arguments(folder, **EPOCHS, adam_beta2=0.95), "train_dataset": rows}


def own_loss_and_callback(folder: str) -> dict[str, Any]:
    return {
        "model": language_model(),
        "args": arguments(folder, max_steps=5, lr_scheduler_type="cosine_with_restarts"),
        "train_dataset": sentences(44),
        "eval_dataset": sentences(6, seed=3),
        "compute_loss_func": summed_loss,
        "callbacks": [ChangingCallback()],
    }


def translation(folder: str) -> dict[str, Any]:
    """An encoder and a decoder, whose inputs have lengths of their own."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    special = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    rows = [{**row, "labels": row["input_ids"][:4]} for row in token_rows(44)]
    return {
        "model": seeded(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **special))),
        "args": arguments(folder, max_steps=3, warmup_steps=0.5),
        "train_dataset": rows,
        "data_collator": hf.DataCollatorForSeq2Seq(tokenizer()),
    }


def token_classes(folder: str) -> dict[str, Any]:
    rows = [{**row, "labels": [token % 3 for token in row["input_ids"]]} for row in token_rows(44)]
    return {
        "model": seeded(lambda: hf.BertForTokenClassification(hf.BertConfig(**TEXT, num_labels=3))),
        "args": arguments(folder, max_steps=3, logging_first_step=True, logging_steps=2),
        "train_dataset": rows,
        "data_collator": hf.DataCollatorForTokenClassification(tokenizer()),
    }


def images(folder: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    rows = [{"pixel_values": torch.randn(3, 16, 16, generator=draw), "labels": n % 3} for n in range(29)]
    config = hf.ViTConfig(**BERT, image_size=16, patch_size=8, num_labels=3)
    return {
        "model": seeded(lambda: hf.ViTForImageClassification(config)),
        "args": arguments(folder, **EPOCHS, dataloader_drop_last=True),
        "train_dataset": rows,
    }


def own_optimizer(folder: str) -> dict[str, Any]:
    """The script's optimizer and schedule; the embedding and the first block are frozen."""
    model = language_model()
    for frozen in (model.transformer.wte, model.transformer.h[0]):
        frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "model": model,
        "args": arguments(folder, max_steps=4),
        "train_dataset": sentences(44),
        "optimizers": (optimizer, schedule),
    }


def packed_adapters(folder: str) -> dict[str, Any]:
    """trl: packed rows, LoRA by peft_config, evaluations without packing."""
    import datasets
    import peft

    rows = datasets.Dataset.from_list([{"text": r["prompt"] + r["completion"]} for r in prompts(60, 1)])
    packing = {"packing": True, "packing_strategy": "wrapped", "eval_packing": False, "max_length": 12}
    return {
        "model": language_model(),
        "args": sft_arguments(folder, max_steps=3, eval_strategy="steps", eval_steps=2, **packing),
        "train_dataset": rows,
        "eval_dataset": rows.select(range(10)),
        "processing_class": tokenizer(),
        "peft_config": peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    }


STAGES: dict[Case, int] = {  # on two ranks: 1 is two replicas
    length_groups: 2,
    evaluation_first: 2,
    masked_words: 1,
    plateau: 2,
    best_epoch: 2,
    smoothed_incomplete: 1,
    weighted_classes: 1,
    regression: 1,
    own_loss_and_callback: 2,
    translation: 2,
    token_classes: 1,
    images: 1,
    own_optimizer: 2,
    packed_adapters: 2,
}


class OwnLoss:
    """A compute_loss as scripts write it for unbalanced classes."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


def train(kind: str, case: Case, folder: str, stages: int | None = None) -> list[dict[str, Any]]:
    options = case(folder)
    bases: list[Any] = [OwnLoss] if options.pop("own_loss", False) else []
    bases += [VarunaTrainer] if kind == "VarunaTrainer" else []
    if hasattr(options["args"], "packing"):
        import trl

        bases.append(trl.SFTTrainer)
    bases.append(hf.Trainer)
    layout = {"stages": stages} if kind == "VarunaTrainer" else {}
    trainer = type("Chosen", tuple(bases), {})(**options, **layout)
    trainer.train()
    logs: list[dict[str, Any]] = trainer.state.log_history
    return logs


@pytest.mark.parametrize("case", STAGES, ids=lambda case: case.__name__)
def test_everyday_arguments(case: Case, pool: Pool, tmp_path: Path) -> None:
    """TRA-1: on two stages or two replicas; with schedules, collators, tasks and trainers people use."""
    expected = train("Trainer", case, str(tmp_path / "one"))
    for entry in expected:  # SFTTrainer: evaluations have them
        for name in ("entropy", "mean_token_accuracy"):
            entry.pop(name, None)
    mine = str(tmp_path / "mine")
    for logs in pool.run(train, 2, "VarunaTrainer", case, mine, STAGES[case], timeout=240):
        assert_same_logs(logs, expected)


class Variant(NamedTuple):
    """Arguments that change how VarunaTrainer computes, but not what it logs."""

    args: dict[str, Any]
    tolerance: float = 1e-5
    recompute: bool = False


VARIANTS = {
    "bf16": Variant({"bf16": True}, tolerance=1e-3),
    # On a CPU, transformers' Trainer takes fp16 and computes in float32.
    "fp16": Variant({"fp16": True}, tolerance=1e-3),
    "one sample": Variant({"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
    "gradient_checkpointing": Variant({"gradient_checkpointing": True}, recompute=True),
}


def train_variants(kind: str, folder: str, stages: int | None = None) -> dict[str, tuple[Any, Any]]:
    """Return the logs of each variant, and (precision, recompute of each stage)."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, variant in VARIANTS.items():
        options = {"max_steps": 2, "report_to": "tensorboard", **variant.args}
        os.environ["TENSORBOARD_LOGGING_DIR"] = place = f"{folder}/{name}"
        args, rows = arguments(place, **options), sentences(44)
        if kind == "Trainer":
            trainer: Any = hf.Trainer(language_model(), args, train_dataset=rows)
        else:
            trainer = VarunaTrainer(language_model(), args, train_dataset=rows, stages=stages)
        trainer.train()
        facts = None
        if kind != "Trainer":
            plan = trainer.pipeline.wrapped.plan
            facts = plan.precision, [stage.recompute for stage in plan.stages]
            trainer.pipeline.close()
        found[name] = trainer.state.log_history, facts
    del os.environ["TENSORBOARD_LOGGING_DIR"]
    return found


def test_precisions_recompute_and_single_samples(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: over two stages, and over the layout that is chosen without stages=; one rank writes logs."""
    expected = train_variants("Trainer", str(tmp_path / "one"))
    for stages, depth in ((2, 2), (None, 1)):
        mine = tmp_path / str(stages)
        for found in pool.run(train_variants, 2, "VarunaTrainer", str(mine), stages, timeout=240):
            for name, (logs, (precision, recompute)) in found.items():
                variant = VARIANTS[name]
                assert_same_logs(logs, expected[name][0], variant.tolerance)
                assert precision == (name if name in ("bf16", "fp16") else "fp32")
                assert recompute == [variant.recompute] * depth
        for name in VARIANTS:
            assert len(list((mine / name).glob("**/events.out.*"))) == 1


def evaluate_and_train(kind: str, folder: str, stages: int | None = None) -> list[dict[str, Any]]:
    options = own_optimizer(folder)
    layout = {} if kind == "Trainer" else {"stages": stages}
    chosen = hf.Trainer if kind == "Trainer" else VarunaTrainer
    trainer: Any = chosen(**options, **layout, eval_dataset=sentences(6, seed=3))
    first = trainer.evaluate()
    trainer.train()
    return [first, *trainer.state.log_history]


def test_an_evaluation_before_training_keeps_the_scripts_optimizer(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: its parameters are replaced by those of the stage when the model is wrapped."""
    expected = evaluate_and_train("Trainer", str(tmp_path / "one"))
    for found in pool.run(evaluate_and_train, 2, "VarunaTrainer", str(tmp_path / "mine"), 2):
        assert_same_logs(found, expected)


def train_from_folder(folder: str, source: str) -> Any:
    """Train a model on `meta`; return its logs and the bytes that this rank has read."""
    weights = hf_weights(source)
    trainer = VarunaTrainer(
        empty_model(source),
        arguments(folder, max_steps=3),
        train_dataset=sentences(44),
        stages=2,
        varuna_options={"initialize": weights},
    )
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return trainer.state.log_history, weights.bytes_read


def test_each_rank_loads_its_stage_from_a_folder(pool: Pool, tmp_path: Path) -> None:
    """TRA-1, TRA-3: the model is on `meta`; no rank reads all weights."""
    source = tmp_path / "source"
    model = language_model()
    model.generation_config.eos_token_id = [1, 9]
    model.save_pretrained(source)
    trainer = hf.Trainer(language_model(), arguments(tmp_path, max_steps=3), train_dataset=sentences(44))
    trainer.train()
    size = (source / "model.safetensors").stat().st_size
    for logs, num_bytes in pool.run(train_from_folder, 2, str(tmp_path / "mine"), str(source)):
        assert_same_logs(logs, trainer.state.log_history)
        assert 0 < num_bytes < 0.8 * size
    saved = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "mine" / "final")
    assert saved.generation_config.eos_token_id == [1, 9]
    weights = saved.state_dict()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


class Hub:
    """Stands for the API of the Hugging Face Hub; records uploads."""

    def __init__(self) -> None:
        self.uploads: list[tuple[str, str]] = []

    def create_repo(self, name: str, **_options: Any) -> Any:
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, **options: Any) -> Any:
        files = sorted(path.name for path in Path(options["folder_path"]).glob("model*.safetensors"))
        self.uploads.append((options["commit_message"], ",".join(files)))
        done: Future[str] = Future()
        done.set_result("https://example.org")
        return done


def test_compiled_stages_and_uploads_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRA-1: torch_compile compiles the stages; transformers uploads the saved files by itself."""
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    plain = hf.Trainer(language_model(), arguments(tmp_path, max_steps=2), train_dataset=sentences(44))
    plain.train()
    uploads = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 2}
    args = arguments(tmp_path / "mine", max_steps=2, torch_compile=True, **uploads)
    trainer = VarunaTrainer(language_model(), args, train_dataset=sentences(44))
    trainer.train()
    assert_same_logs(trainer.state.log_history, plain.state.log_history)
    assert trainer.pipeline.wrapped._options.compile
    trainer.push_to_hub()
    weights = "model.safetensors"
    assert hub.uploads == [("Training in progress, step 2", weights), ("End of training", weights)]


def test_plain_arguments_of_an_sft_trainer_are_kept(tmp_path: Path) -> None:
    """TRA-1: trl makes an SFTConfig of them; adapters with gradient checkpointing train, too."""
    import trl

    options = packed_adapters(str(tmp_path))
    options["args"] = arguments(tmp_path, max_steps=1, gradient_checkpointing=True, torch_compile=False)
    trainer: Any = type("Staged", (VarunaTrainer, trl.SFTTrainer), {})(**options)
    assert isinstance(trainer.args, trl.SFTConfig)
    trainer.train()
    assert [stage.recompute for stage in trainer.pipeline.wrapped.plan.stages] == [True]
    assert trainer.args.to_dict()["gradient_checkpointing"] is True


def test_workers_of_the_dataloader_and_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRA-1: rows of two reading processes, and the values that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown: dict[str, dict[str, float]] = {}
    for kind in ("Trainer", "VarunaTrainer"):

        def case(folder: str) -> dict[str, Any]:
            monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", folder)
            options = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
            args = arguments(folder, **EPOCHS, **options, report_to="tensorboard")
            return {"model": language_model(), "args": args, "train_dataset": sentences(29)}

        train(kind, case, str(tmp_path / kind))
        events = EventAccumulator(str(tmp_path / kind))
        events.Reload()
        names = [name for name in events.Tags()["scalars"] if name in ("train/loss", "train/learning_rate")]
        shown[kind] = {
            f"{name} {event.step}": event.value for name in names for event in events.Scalars(name)
        }
    assert len(shown["Trainer"]) == 12
    assert shown["VarunaTrainer"] == pytest.approx(shown["Trainer"], rel=1e-5)


GPU, OF_TORCHRUN = torch.device("cuda:0"), {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
OF_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "MASTER_ADDR": "first",
}


@pytest.mark.parametrize(
    ("device", "environment", "num_devices", "expected"),
    [
        (GPU, OF_MPIRUN, 4, "cuda:1"),
        (GPU, OF_MPIRUN, 1, "cuda:0"),  # srun shows each process its own
        (torch.device("cuda:1"), OF_TORCHRUN, 4, "cuda:1"),
        (torch.device("cuda:2"), {**OF_MPIRUN, **OF_TORCHRUN}, 4, "cuda:2"),
        (GPU, {}, 4, "cuda:0"),
        (torch.device("cpu"), OF_MPIRUN, 4, "cpu"),
    ],
)
def test_each_process_of_a_machine_has_its_own_gpu(
    device: torch.device, environment: dict[str, str], num_devices: int, expected: str
) -> None:
    """TRA-1: transformers knows the variables of torchrun only."""
    assert str(own_device(device, environment, num_devices=num_devices)) == expected


def test_a_process_without_a_gpu_of_its_own_is_refused() -> None:
    """TRA-1"""
    environment = {**OF_MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    with pytest.raises(ValueError, match="worker 3 of its machine, which has 2 GPUs"):
        own_device(GPU, environment, num_devices=2)


def test_packing_into_one_row_is_refused(tmp_path: Path) -> None:
    """TRA-1: trl's default strategy makes one row of a batch."""
    import trl

    options = packed_adapters(str(tmp_path))
    options["args"].packing_strategy = "bfd"
    kind = type("Staged", (VarunaTrainer, trl.SFTTrainer), {})
    with pytest.raises(ValueError, match=r"packing_strategy='bfd'.*'wrapped'"):
        kind(**options)
