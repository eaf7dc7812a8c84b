"""GPU features: queued work, shared memory, and running out of memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.collectives import check_calls, record_calls
from tests.gpu.tasks import (
    channels_used,
    count_tokens,
    fail_on_the_device,
    hold_activations,
    lose_the_last_stage,
    reduce_by_nccl,
    run_out_of_memory,
    send_by_nccl,
    step_without_waiting,
    train_by_lane,
    train_gpt2_with_flash_attention_alone,
)
from tests.pool import Pool, TaskFailed
from tests.tasks import compare, train, train_plainly
from varuna.cli.doctor.this_machine import check_nccl
from varuna.schedule.orders import held

pytestmark = pytest.mark.gpu

F64 = {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize(("precision", "weigh"), [("bf16", None), ("fp16", count_tokens)])
def test_a_step_waits_for_the_device_once_for_its_loss(pool: Pool, precision: str, weigh: Any) -> None:
    """V14, V21: no hidden synchronisation, with a loss scale and weights of the micro-batches too."""
    losses = pool.run(step_without_waiting, 1, precision, weigh)[0]
    assert losses[-1] < losses[0]


def test_stages_of_one_machine_share_device_memory(pool: Pool) -> None:
    """V21: after the first messages nothing goes through the host; that the results stay exact is proved
    by every test with several stages."""
    for found in pool.run(channels_used, 3):
        assert found and set(found.values()) == {"shared device memory (CUDA IPC)"}


def test_the_doctor_forms_an_nccl_group_and_shares_gpu_memory() -> None:
    findings = {one.what: one for one in check_nccl()}
    assert {name: one.result for name, one in findings.items()} == {"NCCL": "ok", "CUDA IPC": "ok"}, findings


def test_a_stage_that_dies_with_work_queued_is_named(pool: Pool, tmp_path: Path) -> None:
    """V21: the adjacent stage's device waits for it forever, but not its host."""
    report = tmp_path / "report"
    with pytest.raises(TaskFailed):
        pool.run(lose_the_last_stage, 2, str(report))
    assert "rank 1" in report.read_text() and report.read_text().startswith("PeerLost")


def test_an_error_of_a_device_names_its_stage(pool: Pool, tmp_path: Path) -> None:
    """V21: on its own rank and on all others, which end too."""
    with pytest.raises(TaskFailed):  # both processes end
        pool.run(fail_on_the_device, 2, str(tmp_path))
    other, own = (tmp_path / "0").read_text(), (tmp_path / "1").read_text()
    assert "CUDA error" in own and "on rank 1: stage 1" in own
    assert other.startswith("WorkerError: rank 1 (stage 1, replica 0) failed at stage 1")


@pytest.mark.parametrize("schedule", ["varuna", "1f1b", "gpipe"])
def test_a_stage_holds_at_most_what_its_schedule_allows(pool: Pool, schedule: str) -> None:
    """V14, V21: by the allocator; and what it has reserved does not grow from step to step."""
    peak, early, late = pool.run(hold_activations, 2, schedule)[0]
    each, work = 48 << 20, 100 << 20  # of a micro-batch; of one more at work, and the gradients
    most = held(schedule, stage=0, stages=2, microbatches=8)
    assert peak < most * each + work
    if schedule != "varuna":  # which need not hold as many as it may
        assert peak > (most - 1) * each
    assert late == early


def test_out_of_memory_names_stage_consumers_and_a_layout_that_fits(pool: Pool) -> None:
    """V21: and it fits."""
    errors = pool.run(run_out_of_memory, 2, 16)
    assert errors[1].startswith("OutOfDeviceMemory: ") and "activations of 1 micro-batch" in errors[1]
    assert "chunk_size=" in errors[1], errors[1]
    assert errors[0].startswith("WorkerError: rank 1 (stage 1, replica 0) failed at stage 1, micro-batch 0")
    assert pool.run(run_out_of_memory, 2, int(errors[1].split("chunk_size=")[1].rstrip(")"))) == ["", ""]


def test_state_on_the_host_gives_equal_results_bit_for_bit(pool: Pool) -> None:
    """V21: with several stages and replicas, and sharded over them."""
    shared: dict[str, Any] = {"batch": 8, "chunk": 2, "device": "cuda:0", "optimizer": "adam"}
    kept = pool.run(train, 4, "GPT", 2, 2, **shared, shard_optimizer=True, offload_optimizer=True)[0]
    usual = pool.run(train, 4, "GPT", 2, 2, **shared, shard_optimizer=True)[0]
    assert kept["losses"] == usual["losses"]
    assert all(torch.equal(kept["state"][name], tensor) for name, tensor in usual["state"].items())


@pytest.mark.timeout(300)
def test_compiled_stages_on_cuda_train_the_same(pool: Pool) -> None:
    """V10, V21: with dropout, of which each of the layers that share a program draws its own."""
    shared: dict[str, Any] = {"batch": 5, "dtype": torch.float64, "chunk": 2, "device": "cuda:0"}
    options = {"layers": 4, "dropout": 0.3}
    compiled: dict[str, Any] = {"compile": True, "timeout_seconds": 200, "timeout": 250}
    found = pool.run(train, 2, "GPT", 2, 1, model_options=options, **compiled, **shared)[0]
    compare(found, pool.run(train, 1, "GPT", 1, 1, model_options=options, **shared)[0], **F64)


def test_attention_stays_with_the_fused_kernel(pool: Pool) -> None:
    """V21: a traced model of Hugging Face brings a mask, which the fused kernel would refuse."""
    pytest.importorskip("transformers")
    assert pool.run(train_gpt2_with_flash_attention_alone, 1)[0] < 6


def test_all_ranks_of_a_group_make_the_same_calls_on_cuda(pool: Pool) -> None:
    """V21: where losses are known only after the last backward is queued."""
    options: dict[str, Any] = {"batch": 8, "chunk": 1, "precision": "fp16", "device": "cuda:0"}
    assert check_calls(pool.run(record_calls, 4, "GPT", 2, 2, **options)) == 5


def test_gradients_are_reduced_by_nccl(pool: Pool) -> None:
    """V21: in the group of ranks with their own GPU, CPU tensors included."""
    loss, gradients = pool.run(reduce_by_nccl, 1)[0]
    assert loss == 2.0 and gradients == [[1.0, 2.0], [3.0]]


def test_messages_travel_over_an_nccl_lane(pool: Pool) -> None:
    """V21: on streams of its own; neither end waits for the device."""
    assert pool.run(send_by_nccl, 1, 5)[0] == [[[2, 3], [0]]] * 5


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_stages_with_lanes_between_them_train_the_same(pool: Pool, schedule: str) -> None:
    """V21: with the streams and the memory that NCCL's lanes have, though gloo carries them on one GPU."""
    shared: dict[str, Any] = {"batch": 8, "dtype": torch.float64}
    options: dict[str, Any] = {"name": "GPT", "depth": 3, "width": 1, "chunk": 1, "schedule": schedule}
    found, ways = pool.run(train_by_lane, 3, device="cuda:0", **options, **shared)[0]
    compare(found, train_plainly("GPT", **shared), **F64)
    assert ways == {"gloo"}
