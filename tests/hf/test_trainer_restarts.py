"""Restarts of VarunaTrainer in jobs of `varuna run`: which folder a new generation takes, and what it has."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.hf.trainers import (
    arguments,
    assert_same_logs,
    classifier,
    language_model,
    sentences,
    sentences_with_classes,
)
from tests.pool import Pool
from varuna.codec import encode
from varuna.environment import VarunaEnvironment
from varuna.hf import VarunaTrainer
from varuna.hf.trainer import files
from varuna.hf.trainer.files import FolderOwner, find_folder, next_owner
from varuna.morph.interval import SaveRhythm
from varuna.train.saving.save_requests import usr1

STEPS = 6
OWN, OTHER = FolderOwner("job-b", 1), FolderOwner("job-a", 1)


def make_folder(output: Path, step: int, owner: FolderOwner | None = None, state: str | None = "{}") -> str:
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    if owner is not None:
        (folder / files.OWNER).write_text(encode(owner))
    if state is not None:
        (folder / files.TRAINER_STATE).write_text(state)
    return str(folder)


def test_a_generation_takes_the_folders_of_its_own_job(tmp_path: Path) -> None:
    """TRA-1: not those of earlier jobs, of incomplete saves, and of another call of train()."""
    out, base = str(tmp_path), make_folder(tmp_path / "base", 40)
    assert find_folder(out, None, OWN, None) is None
    earlier, by_hand = make_folder(tmp_path, 30, OTHER), make_folder(tmp_path, 31)
    make_folder(tmp_path, 90, OTHER, state=None)
    make_folder(tmp_path, 91, OTHER, state='{"global_step": 9')
    assert find_folder(out, None, OWN, None) is None, "a job that started at step 0"
    assert find_folder(out, base, OWN, None) == base, "the script's choice is the base"
    assert find_folder(out, True, OWN, None) == find_folder(out, True, None, None) == by_hand
    own = make_folder(tmp_path, 2, OWN)
    make_folder(tmp_path, 3, OWN, state=None)
    make_folder(tmp_path, 4, FolderOwner("job-b", 2))
    for given in (None, base, True):
        assert find_folder(out, given, OWN, 30) == own, "progress of this job is not lost"
    assert find_folder(out, None, FolderOwner("job-a", 1), None) == earlier


def test_a_resumed_job_continues_the_folder_of_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRA-1: `varuna run --resume` gives an ended job another name; later generations find the folder."""
    make_folder(tmp_path, 30, OTHER)
    make_folder(tmp_path, 20, FolderOwner("job-a", 2))
    assert find_folder(str(tmp_path), None, OWN, 20) is None, "of the second call of train()"
    assert find_folder(str(tmp_path), None, OWN, 25) is None
    assert "continues at step 25" in caplog.text
    continued = find_folder(str(tmp_path), None, OWN, 30)
    assert continued == str(tmp_path / "checkpoint-30")
    assert find_folder(str(tmp_path), None, OWN, None) == continued


def test_calls_of_train_are_counted_in_each_generation(tmp_path: Path) -> None:
    """TRA-1: the second training of a script must not continue the first one's folders."""
    for generation in (1, 2):
        environment = VarunaEnvironment(job_id="job-c", generation=generation)
        owners = [next_owner(environment, str(tmp_path)) for _ in range(2)]
        assert owners == [FolderOwner("job-c", 1), FolderOwner("job-c", 2)]
    assert next_owner(VarunaEnvironment(), str(tmp_path)) is None


class Observer(transformers.TrainerCallback):
    """Notes the step before each update, and sends the manager's signal."""

    def __init__(self, signal_in: int | None) -> None:
        self.steps: list[int] = []
        self.signal_in = signal_in  # the update; -1: before the model is wrapped

    def on_train_begin(self, *_args: Any, **_options: Any) -> None:
        if self.signal_in == -1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_options: Any) -> None:
        self.steps.append(state.global_step)
        if state.global_step == self.signal_in:
            os.kill(os.getpid(), signal.SIGUSR1)


def train(
    folder: Path,
    *,
    signal_in: int | None = None,
    resume: str | None = None,
    accumulates: bool = False,
    **options: Any,
) -> tuple[list[int], Any]:
    """Train in this process; return the steps that began, and the trainer.

    `accumulates`: each update has two batches, which run one by one.
    """
    observer = Observer(signal_in)
    args = arguments(folder, max_steps=STEPS, gradient_accumulation_steps=2 if accumulates else 1, **options)
    model = classifier() if accumulates else language_model()
    rows = sentences_with_classes(48) if accumulates else sentences(24)
    trainer = VarunaTrainer(model, args, train_dataset=rows, callbacks=[observer], stages=1)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit:
        assert signal_in is not None
    return observer.steps, trainer


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def own_handler() -> list[int]:
    """A handler of the script. Collects the signals that it got."""
    calls = list[int]()
    signal.signal(signal.SIGUSR1, lambda number, _frame: calls.append(number))
    return calls


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    steps, trainer = train(tmp_path_factory.mktemp("whole"))
    assert steps == list(range(STEPS))
    return trainer.state.log_history


def set_generation(monkeypatch: pytest.MonkeyPatch, job: str, generation: int) -> None:
    saves = encode(SaveRhythm(every_seconds=1e-9))  # an autosave is due at every step
    environment = VarunaEnvironment(job_id=job, generation=generation, saves=saves)
    for name, value in environment.write().items():
        monkeypatch.setenv(name, value)


def test_a_planned_change_continues_with_the_training_state(
    tmp_path: Path, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch, own_handler: list[int]
) -> None:
    """TRA-1: with save_only_model, beside a later folder of another job, and with autosaves due."""
    script_handler = signal.getsignal(signal.SIGUSR1)
    make_folder(tmp_path, 9, OTHER)
    options: dict[str, Any] = {"save_only_model": True, "save_strategy": "steps", "save_steps": 2}
    set_generation(monkeypatch, "job-d", 1)
    steps, first = train(tmp_path, signal_in=2, **options)
    assert steps == [0, 1, 2, 3], "the signal of update 2 waits for its end"
    set_generation(monkeypatch, "job-d", 2)
    first.pipeline.close()
    signal.signal(signal.SIGUSR1, script_handler)  # in a new process
    steps, second = train(tmp_path, **options)
    assert steps == [3, 4, 5]
    assert_same_logs(second.state.log_history[:STEPS], uninterrupted[:STEPS])
    assert own_handler == [], "the manager's signal is not the script's"
    assert usr1.script_handler is script_handler
    second.pipeline.close()
    assert signal.getsignal(signal.SIGUSR1) is script_handler
    saved = [path.relative_to(tmp_path) for path in tmp_path.glob("checkpoint-*/varuna/varuna_ckpt_*")]
    assert sorted(map(str, saved)) == [f"checkpoint-{n}/varuna/varuna_ckpt_{n}" for n in (2, 3, 4, 6)]


def test_a_signal_before_the_first_step_waits_for_it(tmp_path: Path, uninterrupted: Any) -> None:
    """TRA-1: a folder that is being resumed keeps its weights."""
    train(tmp_path, signal_in=1)
    saved = tmp_path / "checkpoint-2" / "model.safetensors"
    weights = saved.read_bytes()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # in a new process
    steps, _ = train(tmp_path, signal_in=-1, resume=str(saved.parent))
    assert steps == [2, 3] and saved.read_bytes() == weights
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    steps, trainer = train(tmp_path, resume=str(tmp_path / "checkpoint-3"))
    assert steps == [3, 4, 5]
    assert_same_logs(trainer.state.log_history[:STEPS], uninterrupted[:STEPS])


def test_a_folder_that_is_being_resumed_is_not_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRA-1: a signal before the first update is handled within it, when the folder is all there is."""
    train(tmp_path, signal_in=1, accumulates=True)
    saved = tmp_path / "checkpoint-1"
    assert saved.exists(), "the signal of update 1 is handled between its batches"
    with monkeypatch.context() as patched:
        patched.setattr(files, "begin_folder", lambda *_: pytest.fail("the checkpoint was deleted"))
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # in a new process
        steps, _ = train(tmp_path, signal_in=-1, resume=str(saved), accumulates=True)
        assert steps == [1]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    steps, _ = train(tmp_path, signal_in=2, resume=str(saved), accumulates=True)
    assert steps == [1, 2] and files.is_complete(tmp_path / "checkpoint-2")


def resume_from(folder: str, resume: Any, max_steps: int) -> list[int] | str:
    """Return the steps that began, or the error of this rank."""
    observer = Observer(None)
    trainer = VarunaTrainer(
        language_model(),
        arguments(folder, max_steps=max_steps, save_strategy="steps", save_steps=2),
        train_dataset=sentences(24),
        callbacks=[observer],
        stages=2,
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return observer.steps


def test_a_folder_may_be_a_path_and_its_errors_reach_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: the first rank chooses the folder; the others do not wait for it after an error."""
    assert pool.run(resume_from, 2, str(tmp_path), None, 2) == [[0, 1]] * 2
    assert pool.run(resume_from, 2, str(tmp_path), tmp_path / "checkpoint-2", 3) == [[2]] * 2
    (tmp_path / "checkpoint-2" / files.OWNER).write_text("{")
    for found in pool.run(resume_from, 2, str(tmp_path), True, 3):
        assert "CheckpointError: no checkpoint can be chosen" in found and files.OWNER in found


def test_a_script_keeps_its_own_handler_outside_of_managed_jobs(
    tmp_path: Path, own_handler: list[int]
) -> None:
    """TRA-1: the wrapped model calls it between two steps."""
    steps, trainer = train(tmp_path, signal_in=1)
    assert steps == list(range(STEPS)) and own_handler == [signal.SIGUSR1]
    trainer.pipeline.close()
