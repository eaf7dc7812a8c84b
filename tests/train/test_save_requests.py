"""A signal or a call that reaches one rank at any moment: all ranks act on it at one step boundary."""

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import varuna.train.build
from tests.pool import Pool
from tests.tasks import RememberingSource, logged, make_optimizer, stage_map
from tests.toys import Plain, make_inputs, make_model
from varuna import Varuna
from varuna.capture import Source
from varuna.errors import CheckpointError, PeerLost
from varuna.morph.run.progress_page import ProgressWriter
from varuna.train.saving.autosave import AutosaveTimer
from varuna.train.saving.save_requests import (
    HANDLERS_DIFFER,
    NO_STORE,
    STORE_VARIABLE,
    BoundaryDecision,
    RankRequest,
    SaveRequests,
    decide,
)
from varuna.train.saving.saver import Saver
from varuna.types import Op

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
MOMENTS = ["before the step", "F", "B", "after the step"]
BATCH = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Fresh processes: a wrapped model that earlier tests left alive there would keep the signal."""
    workers = Pool()
    yield workers
    workers.close()


Moments = Mapping[int, Sequence[str]]  # by rank, when it gets the signal


class Job:
    """A toy over some ranks, which notes what it saves and gets signals at the moments that a test names."""

    def __init__(self, depth: int, width: int, model: nn.Module | None = None) -> None:
        self.width = width
        self.saves: list[tuple[int, str]] = []  # (iteration, store)
        self.losses: list[float] = []
        self.moments: list[str] = []
        if model is None:
            varuna.train.build.Source = RememberingSource  # type: ignore[misc]
        RememberingSource.toy = ("Plain", torch.float32, "None")
        self.model = Varuna(
            model or make_model("Plain"),
            stage_map(depth, width),
            make_inputs("Plain", 2, torch.Generator()),
            BATCH,
            1,
            device="cpu",
            seed=1,
            timeout_seconds=30,
            compute_delay=self._delay,
        )
        varuna.train.build.Source = Source  # type: ignore[misc]
        self.optimizer = make_optimizer("sgd", self.model.parameters())
        self.model.set_optimizer(self.optimizer)
        self.model._checkpoints.save = lambda store, **_: self._save(store)

    def step(self, signals: Moments | None = None, *, evaluate: bool = False) -> None:
        self.moments = list((signals or {}).get(dist.get_rank(), ()))
        seed = 1000 * self.model.rank_within_stage + self.model.iteration
        generator = torch.Generator().manual_seed(seed)
        inputs = make_inputs("Plain", BATCH // self.width, generator)
        self._reach("before the step")
        loss, _ = self.model.step(inputs)
        self.losses.append(loss)
        self._reach("after the step")
        self.optimizer.step()
        self.model.zero_grad()
        if evaluate:
            self._reach("evaluation")
            self.model.evaluate(inputs)

    def step_until_exit(self, signals: Moments) -> tuple[object, int]:
        """(exit code, iteration) of a job that gets signals in its second step."""
        self.step()
        try:
            self.step(signals)
            for _ in range(5):
                self.step()
        except SystemExit as left:
            return left.code, self.model.iteration
        raise AssertionError("nothing ended the training")

    def _delay(self, op: Op, microbatch: int) -> float:
        self._reach(op)
        return 0.0

    def _reach(self, moment: str) -> None:
        while moment in self.moments:
            self.moments.remove(moment)
            os.kill(os.getpid(), signal.SIGUSR1)

    def _save(self, store: str) -> "Future[str]":
        self.saves.append((self.model.iteration, store))
        saved: Future[str] = Future()
        saved.set_result(store)
        return saved


@contextmanager
def job(depth: int, width: int, *, store: str = "", model: nn.Module | None = None) -> Iterator[Job]:
    """With the environment and the signal as they were when it ends."""
    os.environ[STORE_VARIABLE] = store
    made = Job(depth, width, model)
    try:
        yield made
    finally:
        made.model.close()
        os.environ.pop(STORE_VARIABLE, None)
        if os.environ.get("RANK", "0") == "0":  # another rank could remove the claim of its next job
            shutil.rmtree("folder", ignore_errors=True)  # claimed, and never written
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def own_handler() -> Any:
    return signal.getsignal(signal.SIGUSR1)


# ---------------------------------------------------------------- the script's own handler


@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_a_scripts_handler_waits_for_a_boundary_and_then_runs_on_all_ranks_at_the_same_step(
    pool: Pool, depth: int, width: int
) -> None:
    """V40, at random moments, on random ranks; and the numbers of the training are what they were."""
    results = pool.run(train_with_and_without_signals, depth * width, depth, width)
    for undisturbed, *disturbed in results:
        assert undisturbed.acts == []
        for run, of_first_rank in zip(disturbed, results[0][1:], strict=True):
            assert run.acts == of_first_rank.acts, "ranks acted at different steps"
            assert run.acts == sorted(set(run.acts))
            assert not run.mid_step
            for step in run.sent:  # in the step itself where the ranks were about to act anyway
                assert {step, step + 1, step + 2} & set(run.acts), f"the signal of step {step} was lost"
            assert max(run.acts) > run.pestered_from, "the signals from another thread were lost"
            assert run.losses == undisturbed.losses


class Run(NamedTuple):
    acts: list[int]  # the iterations at which the script's handler ran
    sent: list[int]  # the steps in which signals were sent
    pestered_from: int  # more came after this one
    losses: list[float]
    mid_step: bool


def train_with_and_without_signals(depth: int, width: int) -> list[Run]:
    return [
        train_under_signals(depth, width, share=0.0, before_wrapping=True),
        train_under_signals(depth, width, share=0.3, before_wrapping=True),
        train_under_signals(depth, width, share=0.3, before_wrapping=False),
    ]


def train_under_signals(depth: int, width: int, *, share: float, before_wrapping: bool) -> Run:
    acts: list[int] = []
    mid_step = False

    def handler(signum: int, frame: FrameType | None) -> None:
        nonlocal mid_step
        mid_step |= any(p.grad is not None for p in training.model.parameters())
        acts.append(training.model.iteration)

    if before_wrapping:
        signal.signal(signal.SIGUSR1, handler)
    seed, world = f"{depth} {width} {before_wrapping}", depth * width
    chance, sent = random.Random(seed), list[int]()
    with job(depth, width) as training:
        if not before_wrapping:
            signal.signal(signal.SIGUSR1, handler)
        training.step()
        for step in range(1, 25):
            evaluate = chance.random() < 0.3
            moments = [*MOMENTS, "evaluation"] if evaluate else MOMENTS
            reached = chance.sample(range(world), chance.randint(1, world))
            signals = {rank: chance.choices(moments, k=chance.randint(1, 2)) for rank in reached}
            if chance.random() >= share:
                signals = {}
            sent += [step] if signals else []
            training.step(signals, evaluate=evaluate)
        for _ in range(3):
            training.step()
        pestered_from = training.model.iteration
        pestering = threading.Thread(target=pester, args=(f"{seed} {dist.get_rank()}",))
        if share:
            pestering.start()
        for _ in range(10):
            training.step()
        if share:
            pestering.join()
        for _ in range(3):
            training.step()
        return Run(acts, sent, pestered_from, training.losses, mid_step)


def pester(seed: str) -> None:
    """Signals from outside the training, at moments that no test could name."""
    chance = random.Random(seed)
    for _ in range(4):
        time.sleep(chance.random() * 0.01)
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_handler_that_saves_and_exits_is_an_ordinary_handler(pool: Pool) -> None:
    """V40, as the original documents it: one rank gets the signal, all save the same step and leave."""
    for code, iteration, saves, restored in pool.run(save_and_exit, 4):
        assert (code, iteration, saves, restored) == (7, 2, [(2, "folder")], True)


def save_and_exit() -> tuple[object, int, list[tuple[int, str]], bool]:
    def handler(signum: int, frame: FrameType | None) -> None:
        training.model.on_demand_checkpoint("folder")
        raise SystemExit(7)

    signal.signal(signal.SIGUSR1, handler)
    with job(2, 2) as training:
        code, iteration = training.step_until_exit({3: ["F"]})
        training.model.close()
        return code, iteration, training.saves, own_handler() is handler


def test_a_handler_that_hands_the_signal_on_is_called_once(pool: Pool) -> None:
    assert pool.run(hand_on, 1) == [[2]]


def hand_on() -> list[int]:
    calls: list[int] = []
    with job(1, 1) as training:
        before = own_handler()

        def handler(signum: int, frame: FrameType | None) -> None:
            calls.append(training.model.iteration)
            before(signum, frame)

        signal.signal(signal.SIGUSR1, handler)
        training.step()
        training.step({0: ["F"]})
        for _ in range(3):
            training.step()
        training.model.close()
        own_handler()(signal.SIGUSR1, None)  # nobody is there any more to hand it on to
    return calls[:-1]


# ---------------------------------------------------------------- no handler


@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_a_script_without_a_handler_saves_and_exits_at_the_same_step_on_all_ranks(
    pool: Pool, depth: int, width: int
) -> None:
    """V40: one rank is reached, all are, all are twice."""
    world = depth * width
    reached = [
        {world - 1: ["F"]},
        *({r: times for r in range(world)} for times in (["F"], ["F", "after the step"])),
    ]
    for results in pool.run(leave_thrice, world, depth, width, reached):
        assert results == [(0, 2, [(2, "folder")], True, signal.SIG_IGN)] * 3


def leave_thrice(depth: int, width: int, reached: list[Moments]) -> list[Any]:
    return [leave(depth, width, signals) for signals in reached]


def leave(depth: int, width: int, signals: Moments) -> tuple[object, int, Any, bool, Any]:
    with job(depth, width, store="folder") as training:
        code, iteration = training.step_until_exit(signals)
        os.kill(os.getpid(), signal.SIGUSR1)  # one more during the exit: the default handler would kill
        closed = training.model._session.closed
        training.model.close()
        return code, iteration, training.saves, closed, own_handler()


def test_a_model_that_was_refused_leaves_the_signal_to_the_script(pool: Pool) -> None:
    """V40: also where the error is kept, and what there is of the model with it."""
    assert pool.run(be_refused, 1) == [True]


def be_refused() -> bool:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ValueError, match="spans") as kept:
        inputs = make_inputs("Plain", 2, torch.Generator().manual_seed(1))
        Varuna(make_model("Plain"), "0;", inputs, 4, 2, device="cpu", spans=[(3, 1)])
    return signal.getsignal(signal.SIGUSR1) == before and kept.value is not None


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_rank_that_waits_for_the_others_between_two_steps_shows_a_hang(pool: Pool, is_lost: bool) -> None:
    """HOT-5: else the manager would wait 15 minutes for a worker that was stopped there."""
    log = ["on demand True", "meets True", "gather", "meets False", "on demand False"]
    assert pool.run(note_waits, 1, is_lost) == [log]


def note_waits(is_lost: bool) -> list[str]:
    log = list[str]()
    with job(1, 1) as training:
        saver, session = training.model._saver, training.model._session

        def gather(value: Any, kind: Any) -> list[Any]:
            log.append("gather")
            if is_lost:
                raise PeerLost("another rank is lost")
            return [value]

        noted = SimpleNamespace(
            on_demand=lambda now: log.append(f"on demand {now}"), meets=lambda now: log.append(f"meets {now}")
        )
        before = saver._progress, session.gather
        saver._progress, session.gather = noted, gather  # type: ignore[assignment,method-assign]
        with suppress(PeerLost):
            saver.run_requests()
        saver._progress, session.gather = before  # type: ignore[method-assign]
    return log


def test_where_no_store_is_known_the_training_goes_on(pool: Pool) -> None:
    for lines, steps, saves in pool.run(signal_without_store, 2):
        assert (lines, steps, saves) == ([NO_STORE], 4, [])


def signal_without_store() -> tuple[list[str], int, Any]:
    with job(2, 1) as training, logged() as lines:
        for step in range(4):
            training.step({1: ["B"]} if step == 1 else {})
        return lines, training.model.iteration, training.saves


def test_a_checkpoint_on_demand_that_fails_does_not_end_the_training(pool: Pool) -> None:
    for lines, steps in pool.run(fail_to_save, 2):
        assert lines == ["the requested checkpoint was not saved, training continues: the disk is full"]
        assert steps == 4


def fail_for_want_of_room(store: str) -> "Future[str]":
    raise CheckpointError("the disk is full")


def fail_to_save() -> tuple[list[str], int]:
    with job(1, 2, store="folder") as training, logged() as lines:
        training.model._checkpoints.save = lambda store, **_: fail_for_want_of_room(store)
        for step in range(4):
            training.step({0: ["F"]} if step == 1 else {})
        return lines, training.model.iteration


class Ringing(Plain):
    """Gets the signal while it is captured."""

    rung = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not Ringing.rung:
            Ringing.rung = True
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(x, y)


def test_a_signal_during_capture_is_kept_until_the_first_boundary(pool: Pool) -> None:
    """V40."""
    assert pool.run(signal_during_capture, 1) == [(0, [(1, "folder")])]


def signal_during_capture() -> tuple[object, list[tuple[int, str]]]:
    Ringing.rung = False
    with job(1, 1, store="folder", model=Ringing()) as training:
        assert Ringing.rung, "the model was not captured"
        code, _ = training.step_until_exit({})
        return code, training.saves


# ---------------------------------------------------------------- a call


def test_a_request_from_any_thread_saves_on_all_ranks_and_the_training_goes_on(pool: Pool) -> None:
    """If ranks name different stores, the store of the lowest rank is used."""
    for saves, steps in pool.run(request_from_threads, 4):
        assert (saves, steps) == ([(2, "of rank 1"), (4, "of rank 3")], 6)


def request_from_threads() -> tuple[list[tuple[int, str]], int]:
    with job(2, 2) as training:
        for step in range(6):
            asking = {1: (1, 2), 3: (3,)}.get(step, ())
            if dist.get_rank() in asking:
                name = f"of rank {dist.get_rank()}"
                thread = threading.Thread(target=training.model.on_demand_checkpoint, args=(name,))
                thread.start()
                thread.join()
            training.step()
        return training.saves, training.model.iteration


def test_checkpoint_with_on_demand_returns_a_future(pool: Pool) -> None:
    assert pool.run(request_with_a_future, 1) == [("folder", "the disk is full")]


def request_with_a_future() -> tuple[str, str]:
    with job(1, 1) as training:
        ask = training.model.checkpoint
        good = ask("folder", on_demand=True)
        training.step()
        training.step()
        training.model._checkpoints.save = lambda store, **_: fail_for_want_of_room(store)
        bad = ask("elsewhere", on_demand=True)
        training.step()
        training.step()
        return good.result(timeout=0), str(bad.exception(timeout=0))


def test_a_model_wrapped_outside_the_main_thread_leaves_the_signal_alone(pool: Pool) -> None:
    assert pool.run(wrap_in_a_thread, 1) == [(signal.SIG_DFL, [(1, "folder")])]


def wrap_in_a_thread() -> tuple[Any, list[tuple[int, str]]]:
    def work() -> None:
        training = Job(1, 1)
        found.append(own_handler())
        training.model.on_demand_checkpoint("folder")
        training.step()
        training.step()
        training.model.close()
        found.append(training.saves)

    found: list[Any] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0], found[1]


# ---------------------------------------------------------------- owner of the signal


def test_the_signal_goes_back_to_the_script_when_the_last_model_is_closed(pool: Pool) -> None:
    assert pool.run(wrap_twice, 1) == [([0, 1], True)]


def wrap_twice() -> tuple[list[int], bool]:
    def handler(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("called though models are open")

    signal.signal(signal.SIGUSR1, handler)
    with job(1, 1) as first, job(1, 1) as second:
        signal.signal(signal.SIGUSR1, handler)
        asked = []
        for training in (first, second):
            training.step()
        os.kill(os.getpid(), signal.SIGUSR1)
        asked = [len(training.model._requests._queue) for training in (first, second)]
        first.model.close()
        between = own_handler()
        second.model.close()
        return asked, between is not handler and own_handler() is handler


def test_a_model_that_is_let_go_of_gives_the_signal_back(pool: Pool) -> None:
    assert pool.run(drop, 1) == [signal.SIG_IGN]


def drop() -> Any:
    import gc

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    Job(1, 1)
    gc.collect()
    found = own_handler()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return found


def test_a_process_forked_from_a_rank_does_not_die_of_the_signal(pool: Pool) -> None:
    """Like the workers of a data loader."""
    assert pool.run(signal_a_fork, 1) == [0]


def signal_a_fork() -> int:
    with job(1, 1):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.read(reading, 1)
            os._exit(0)
        os.kill(child, signal.SIGUSR1)
        os.write(writing, b"x")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---------------------------------------------------------------- deciding


def request(
    text: str = "", *, store: str | None = None, usual: str | None = None, due: str | None = None
) -> RankRequest:
    return RankRequest("signal" in text, "handler" in text, store, usual, due, "full" not in text)


@pytest.mark.parametrize(
    ("requests", "decision"),
    [
        ([request(), request(store="b"), request(store="c")], BoundaryDecision(save_to="b")),
        ([request("handler"), request("handler", store="b")], BoundaryDecision(save_to="b")),
        (
            [request("handler signal"), request("handler")],
            BoundaryDecision(call_handler=True, signalled=True),
        ),
        (
            [request("handler signal"), request("handler", store="b")],
            BoundaryDecision(save_to="b", call_handler=True, signalled=True),
        ),
        (
            [request("signal", usual="a"), request(usual="a")],
            BoundaryDecision(save_to="a", exit=True, signalled=True),
        ),
        (
            [request(usual="a"), request("signal", store="b")],
            BoundaryDecision(save_to="b", exit=True, signalled=True),
        ),
        ([request("signal"), request()], BoundaryDecision(NO_STORE, signalled=True)),
        ([request(due="a"), request()], BoundaryDecision(autosave_to="a", in_background=True)),
        ([request(due="a"), request("full")], BoundaryDecision(autosave_to="a")),
        ([request(due="a"), request(store="b")], BoundaryDecision(save_to="b")),
        (
            [request(due="a", usual="a"), request("signal")],
            BoundaryDecision(save_to="a", exit=True, signalled=True),
        ),
        (
            [request("handler signal"), request(usual="a")],
            BoundaryDecision(HANDLERS_DIFFER, save_to="a", exit=True, signalled=True),
        ),
    ],
)
def test_all_ranks_decide_the_same_from_the_requests_of_each(
    requests: list[RankRequest], decision: BoundaryDecision
) -> None:
    assert decide(requests) == decision


def test_snapshots_need_the_memory_of_all_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """V40: also where the launcher, such as mpirun, does not set LOCAL_WORLD_SIZE."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    counted: list[int] = []

    def fits(_bytes: int | None, *, ranks_on_machine: int) -> bool:
        counted.append(ranks_on_machine)
        return True

    session = SimpleNamespace(rank=0, ranks=[0], stage=0, gather=lambda own, _kind: [own])
    trainer: Any = SimpleNamespace(session=session, engine=SimpleNamespace())
    checkpoints: Any = SimpleNamespace(store=None, fits_in_memory=fits)
    tracer: Any = None
    Saver(
        checkpoints, SaveRequests(AutosaveTimer(None, None)), trainer, ProgressWriter(), tracer
    ).run_requests()
    assert counted == [4]
