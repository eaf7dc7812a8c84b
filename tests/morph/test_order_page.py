"""Morph orders and progress pages: what an agent writes, its worker reads, and the other way round."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from varuna.environment import VarunaEnvironment
from varuna.errors import WorkerError
from varuna.morph.run import progress_page
from varuna.morph.run.order_page import OrderReader, OrderWriter, apply_environment, open_orders
from varuna.morph.run.progress_page import ProgressReader, open_progress
from varuna.morph.state import MorphParts
from varuna.train.hot.follow_orders import wait_for_loss_order
from varuna.types import Layout, MorphOrder

TWO_STAGES = Layout(((0,), (1,)), batch_size=8, microbatch_size=2)
ONE_STAGE = Layout(((0, 1),), batch_size=8, microbatch_size=2)


def order(generation: int, **fields: object) -> MorphOrder:
    return MorphOrder(
        generation=generation,
        layout=ONE_STAGE,
        last_layout=TWO_STAGES,
        rank=1,
        previous=(0, None),
        leaving=(1,),
        master_addr="host",
        master_port=1234,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
def progress_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "rank_0.progress"
    for name, value in VarunaEnvironment(progress_file=str(path), generation=3).write().items():
        monkeypatch.setenv(name, value)
    return path


def test_a_worker_takes_each_order_once_and_the_newest_one(progress_file: Path) -> None:
    """HOT-1"""
    writer = OrderWriter(progress_file)
    reader = open_orders()
    assert not reader.is_pending
    with pytest.raises(RuntimeError, match="no order is pending"):
        reader.take()
    writer.give(order(4))
    assert writer.taken == 0, "the agent sees when the worker begins to carry it out"
    assert reader.is_pending and reader.take() == order(4) and not reader.is_pending
    assert writer.taken == 4
    writer.give(order(5))
    writer.give(order(6, environment={"RANK": "1"}, why="b joins"))
    assert reader.take() == order(6, environment={"RANK": "1"}, why="b joins") and not reader.is_pending
    writer.close()
    assert not list(progress_file.parent.iterdir())


def test_a_joiner_reads_its_order_though_it_was_written_before_it_looks(progress_file: Path) -> None:
    """HOT-5"""
    writer = OrderWriter(progress_file)
    writer.give(order(3))  # its own tentative generation
    assert open_orders().take().generation == 3
    writer.close()


@pytest.mark.parametrize("has_taken", [False, True])
def test_a_worker_misses_a_joiner_only_once_it_has_taken_the_order_to_join(
    progress_file: Path, has_taken: bool
) -> None:
    """HOT-3, HOT-5: else it goes on to the end of its step, which does not need the joiner."""
    writer = OrderWriter(progress_file)
    reader = open_orders()
    writer.give(order(4))  # rank 1 joins
    if has_taken:
        reader.take()
    writer.give(order(5, lost=(1,), old_rank=0))
    assert reader.is_pending and reader.abandons == has_taken
    writer.give(order(6, lost=(0,), old_rank=0))
    assert reader.abandons, "a rank of its own generation is lost"
    reader.take()
    assert not reader.abandons and not reader.is_pending
    writer.close()


def test_a_worker_that_others_have_left_takes_the_order_of_a_lost_joiner(progress_file: Path) -> None:
    """HOT-3: the others had taken the order to join, so they abandoned this rank at the end of its step."""
    writer = OrderWriter(progress_file)
    reader = open_orders()
    writer.give(order(4))  # rank 1 joins
    writer.give(order(5, lost=(1,), old_rank=0))
    model: Any = SimpleNamespace(_orders=reader)
    assert not reader.abandons and wait_for_loss_order(model, seconds=0.0).generation == 5
    with pytest.raises(WorkerError, match="has waited 0 s for an order"):
        wait_for_loss_order(model, seconds=0.0)
    writer.close()


def test_a_worker_without_an_agent_has_no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VARUNA_PROGRESS_FILE", raising=False)
    reader = open_orders()
    assert type(reader) is OrderReader and not reader.is_pending


def test_an_order_replaces_the_variables_of_the_last_generation(progress_file: Path) -> None:
    """HOT-1"""
    old = VarunaEnvironment(resume_step=7, plan="{}", joins="1", generation=3, job_id="j", cache="c").write()
    environment = {**old, "RANK": "5", "HOME": "/root"}
    new = VarunaEnvironment(generation=4, batch_size=8).write()
    apply_environment(order(4, environment={"RANK": "1", **new}), environment)
    kept = VarunaEnvironment(job_id="j", cache="c").write()
    assert environment == {**kept, **new, "RANK": "1", "HOME": "/root"}


def test_the_progress_page_tells_whether_a_worker_morphs_in_place(progress_file: Path) -> None:
    """HOT-1"""
    reader = ProgressReader(progress_file, 0)
    writer = open_progress()
    first = reader.read()
    assert (first.hot, first.why_not, first.waits, first.generation) == (False, "", False, 3)
    writer.hot(False, "the script passes tensors to step()")
    assert reader.read().why_not == "the script passes tensors to step()"
    writer.hot(True)
    writer.waits(True)
    now = reader.read()
    assert (now.hot, now.why_not, now.waits) == (True, "", True)
    writer.morphed(4, MorphParts(1.5, 0.5, 0.125), seconds=0.25, num_bytes=2**33, iteration=7)
    now = reader.read()
    assert now.iteration == 7, "it may have gone back to copies of an earlier step"
    assert (now.generation, now.morph_seconds, now.morph_bytes, now.waits) == (4, 0.25, 2**33, False)
    assert now.morph_parts == MorphParts(1.5, 0.5, 0.125)
    reader.close()
    assert "progress" not in "".join(os.listdir(progress_file.parent))


def test_a_report_has_the_age_of_the_last_step(progress_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B6: what came after the end of that step is lost if the next one is interrupted."""
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(progress_page, "time", clock)
    reader = ProgressReader(progress_file, 0)
    writer = open_progress()
    writer.enter()
    clock.monotonic = lambda: 104.0
    assert reader.read().step_age == 0.0, "no step has ended"
    writer.leave(1, 0.5)
    clock.monotonic = lambda: 105.5
    writer.enter()
    assert reader.read().step_age == 1.5
    reader.close()


def test_the_progress_page_keeps_its_numbers_and_texts_apart(progress_file: Path) -> None:
    """SEE-3"""
    reader = ProgressReader(progress_file, 0)
    writer = open_progress()
    writer.uses("s3://bucket/" + "x" * 2000)
    writer.note("a note")
    writer.holds_copy_of(2)
    writer.saved(1, 0.5, write_seconds=7.0)
    writer.leave(1, 0.5, missing_samples=0)
    writer.leave(2, 0.25, missing_samples=5)
    writer.leave(3, 0.25, missing_samples=2)
    now = reader.read()
    assert (now.iteration, now.steps, now.compute_seconds, now.missing_samples) == (3, 3, 0.25, 7)
    assert (now.saved_step, now.save_seconds, now.write_seconds) == (1, 0.5, 7.0)
    assert (now.store, now.note, now.copy_of) == ("s3://bucket/" + "x" * 2000, "a note", 2)
    reader.close()
