"""The examples do what they say, in real processes, and their losses are those of one plain process."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
TOLERANCE = {"rel": 1e-5, "abs": 0}


def script(name: str) -> str:
    return str(ROOT / "examples" / f"{name}.py")


def module(name: str) -> ModuleType:
    if str(ROOT / "examples") not in sys.path:
        sys.path.append(str(ROOT / "examples"))
    return importlib.import_module(name)


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What the first rank printed; the job must end well."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VARUNA_")}
    own = {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "VARUNA_HOME": str(folder),
        "VARUNA_CACHE": str(folder / "cache"),
    }
    job = subprocess.run(
        command, cwd=folder, env={**kept, **own, **environment}, capture_output=True, text=True
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def run_varuna(folder: Path, *command: str, workers: int, stages: int, batch: int, chunk: int) -> str:
    (folder / "machines").write_text("127.0.0.1\n")
    return run(
        [
            *[sys.executable, "-m", "varuna.run_varuna", "--machine_list", "machines"],
            *["--gpus_per_node", str(workers), "--nstages", str(stages)],
            *["--batch_size", str(batch), "--chunk_size", str(chunk), *command],
        ],
        folder,
    )


def losses(output: str) -> list[float]:
    """Return the losses that the script has printed; the manager's status names a loss, too."""
    lines = [line for line in output.splitlines() if not line.startswith("varuna: ")]
    return [float(found) for line in lines for found in re.findall(r" loss (\S+)", line)]


def plain_gpt(batch: int) -> list[float]:
    gpt = module("gpt")
    return [loss for _, loss in gpt.train_plainly(gpt.make_model(), batch_size=batch, steps=3)]


@pytest.mark.timeout(300)
def test_the_demo_ends_with_losses_equal_to_one_process(tmp_path: Path) -> None:
    """V10, V16: 2 stages x 2 replicas under the launcher."""
    output = run([sys.executable, "-m", "varuna", "demo", "--steps", "5"], tmp_path)
    assert "losses of all 5 steps over 4 workers equal the single process's" in output
    assert float(re.search(r"largest difference: (\S+) relative", output)[1]) <= 1e-5  # type: ignore[index]


@pytest.mark.timeout(600)
def test_the_job_whose_machines_change_has_the_losses_of_one_process(tmp_path: Path) -> None:
    """V39, V42, V47: machines join, a worker is killed, a machine leaves; the picture shows each of them."""
    picture = tmp_path / "morphing.svg"
    output = run(
        [sys.executable, script("morphing"), "--steps", "160", "--pause", "0.3", "--out", str(picture)],
        tmp_path,
    )
    assert "steps missing: 0" in output
    for event in ("two machines", "two join", "worker killed", "one leaves"):
        assert event in output and event in picture.read_text()


@pytest.mark.timeout(300)
def test_the_gpt_reads_the_flags_of_run_varuna(tmp_path: Path) -> None:
    """V10, V13, V15, V16, V18, V30"""
    output = run_varuna(tmp_path, script("gpt"), "--steps", "3", workers=2, stages=2, batch=4, chunk=2)
    assert losses(output) == pytest.approx(plain_gpt(4), **TOLERANCE)


@pytest.mark.timeout(300)
def test_the_gpt_runs_under_torchrun(tmp_path: Path) -> None:
    """V16, V30: two replicas."""
    flags = ["--steps", "3", "--stage_to_rank_map", "0,1;", "--batch-size", "4"]
    output = run([*TORCHRUN, "2", script("gpt"), *flags], tmp_path)
    assert losses(output) == pytest.approx(plain_gpt(8), **TOLERANCE)


@pytest.mark.timeout(300)
def test_the_gpt_goes_on_from_its_checkpoint_at_another_layout(tmp_path: Path) -> None:
    """V35, V36: from one process to two stages."""
    gpt = module("gpt")
    expected = [loss for _, loss in gpt.train_plainly(gpt.make_model(), batch_size=4, steps=5)]
    flags = ["--steps", "5", "--store", "store", "--save_every", "3"]
    whole = run([sys.executable, script("gpt"), *flags, "--batch-size", "4"], tmp_path)
    assert losses(whole) == pytest.approx(expected, **TOLERANCE)
    again = run_varuna(tmp_path, script("gpt"), *flags, workers=2, stages=2, batch=4, chunk=1)
    assert losses(again) == pytest.approx(expected[3:], **TOLERANCE)  # from the checkpoint of step 3


@pytest.mark.timeout(300)
def test_the_cnn_reads_the_environment_of_run_varuna(tmp_path: Path) -> None:
    """V17, V18, V30: the running statistics, and so the evaluation, are those of one process."""
    output = run_varuna(tmp_path, script("cnn"), "--steps", "3", workers=4, stages=2, batch=8, chunk=2)
    plain = module("cnn").train_plainly(batch_size=8, chunk_size=2, steps=3)
    assert losses(output) == pytest.approx(losses("\n".join(plain)), **TOLERANCE)


@pytest.mark.timeout(300)
def test_the_cnn_runs_under_torchrun_as_a_pipeline(tmp_path: Path) -> None:
    """V17, V30"""
    command = [*TORCHRUN, "2", script("cnn"), "--steps", "3"]
    output = run(command, tmp_path, VARUNA_STAGE_TO_RANK_MAP="0;1;")
    plain = module("cnn").train_plainly(batch_size=12, chunk_size=4, steps=3)
    assert losses(output) == pytest.approx(losses("\n".join(plain)), **TOLERANCE)


@pytest.mark.timeout(300)
def test_lora_trains_saves_and_exports(tmp_path: Path) -> None:
    """TRA-2: two stages with the losses of peft in one process; then one process continues."""
    expected = list(module("lora").train_plainly(batch_size=6, steps=3))
    flags = ["--stages", "2", "--store", "store"]
    output = run([*TORCHRUN, "2", script("lora"), "--steps", "2", *flags, "--out", "adapter"], tmp_path)
    assert losses(output)[:2] == pytest.approx(expected[:2], **TOLERANCE) and "merged" in output
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()
    again = run([sys.executable, script("lora"), "--steps", "3", "--store", "store"], tmp_path)
    assert losses(again) == pytest.approx(expected[2:], **TOLERANCE)
    four_bits = run([sys.executable, script("lora"), "--steps", "2", "--four-bit"], tmp_path)
    expected = list(module("lora").train_plainly(batch_size=6, steps=2, four_bit=True))
    assert losses(four_bits) == pytest.approx(expected, **TOLERANCE)


def plain_hugging_face(name: str) -> list[float]:
    return list(module("huggingface").train_plainly(name, batch_size=6, steps=2))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "stages"), [("gpt2", 3), ("bert", 2), ("llama", 2)])
def test_hugging_face_models_train_as_they_are(tmp_path: Path, name: str, stages: int) -> None:
    """B8, V2, V6: unedited, with tied weights, RoPE, dropout, and Bert's loss over some of the tokens."""
    given = [script("huggingface"), "--model", name, "--steps", "2"]
    output = run_varuna(tmp_path, *given, workers=stages, stages=stages, batch=6, chunk=2)
    assert losses(output) == pytest.approx(plain_hugging_face(name), **TOLERANCE)


@pytest.mark.timeout(300)
def test_a_hugging_face_model_trains_over_two_stages_under_torchrun(tmp_path: Path) -> None:
    """B8, V30"""
    command = [*TORCHRUN, "2", script("huggingface"), "--steps", "2"]
    output = run(command, tmp_path, VARUNA_STAGE_TO_RANK_MAP="0;1;")
    assert losses(output) == pytest.approx(plain_hugging_face("gpt2"), **TOLERANCE)


@pytest.mark.timeout(300)
def test_a_hugging_face_model_is_compared_with_a_plain_one_on_request(tmp_path: Path) -> None:
    """B8: one stage."""
    output = run([sys.executable, script("huggingface"), "--steps", "2", "--compare"], tmp_path)
    found = re.search(r"largest relative difference from one plain process: (\S+)", output)
    assert found is not None and float(found[1]) <= 1e-5
    assert losses(output) == pytest.approx(plain_hugging_face("gpt2"), **TOLERANCE)


@pytest.mark.timeout(300)
def test_a_model_is_measured_once_and_planned_for_any_number_of_devices(tmp_path: Path) -> None:
    """V24, V25"""
    output = run([sys.executable, script("plan"), "--layers", "4", "--width", "32"], tmp_path)
    head, *rows = [line.split() for line in output.splitlines()]
    assert head[:4] == ["devices", "stages", "replicas", "micro-batch"]
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert all(int(row[1]) * int(row[2]) <= int(row[0]) and float(row[4]) > 0 for row in rows)


@pytest.mark.timeout(300)
def test_a_plain_model_trains_under_torchrun_as_one_process_would(tmp_path: Path) -> None:
    """R1, R17: two stages, two ranks with samples of their own, the process group made by the library."""
    output = run(
        [*TORCHRUN, "2", script("rannc"), "--steps", "5", "--device", "cpu"],
        tmp_path,
        RANNC_PARTITION_NUM="2",
        RANNC_PIPELINE_NUM="4",
        HOME=str(tmp_path),
    )
    torch.manual_seed(0)
    model = module("rannc").Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(5):
        x = torch.cat([torch.randn(32, 32, generator=generator) for generator in generators])
        scores = model(x)
        loss = F.cross_entropy(scores, x[:, :10].argmax(1))
        own = F.cross_entropy(scores[:32], x[:32, :10].argmax(1)).item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(output.split()[-1]) == pytest.approx(own, abs=1e-4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["lightning_autoencoder", "fabric_classifier"])
def test_lightning_trains_as_one_process_would(tmp_path: Path, name: str) -> None:
    """TRA-5: with Lightning's own launcher, over two stages."""
    plain = run([sys.executable, script(name)], tmp_path, HOME=str(tmp_path))
    found = run(
        [sys.executable, script(name), "--devices", "2", "--stages", "2"], tmp_path, HOME=str(tmp_path)
    )
    assert losses(found) == pytest.approx(losses(plain), rel=1e-4) and len(losses(found)) >= 8


@pytest.mark.timeout(300)
def test_trainer(tmp_path: Path) -> None:
    """TRA-1: the Trainer example prints the losses of one process, and saves a model for from_pretrained."""
    import transformers

    alone = losses(run([sys.executable, script("trainer"), "--steps", "3"], tmp_path))
    command = [*TORCHRUN, "2", script("trainer"), "--steps", "3", "--stages", "2", "--output", "two"]
    assert losses(run(command, tmp_path)) == pytest.approx(alone, **TOLERANCE)
    assert len(alone) == 3
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "two" / "final")
    assert saved.config.num_hidden_layers == 4
    trainer = module("trainer").make_sft_trainer(str(tmp_path / "one"), 3, None)
    trainer.train()
    alone = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(alone) == 3 and alone[0] > alone[-1]
    command = [*TORCHRUN, "2", script("trainer"), "--steps", "3", "--stages", "2", "--sft"]
    assert losses(run(command, tmp_path)) == pytest.approx(alone, **TOLERANCE)


def test_the_example_of_verify_is_equal_at_its_layouts(tmp_path: Path) -> None:
    """PRO-1"""
    output = run([sys.executable, script("verify")], tmp_path)
    assert "verdict: equal: all 3 layouts train as one plain process does" in output
