"""Steps in which a rank is lost: what waits before it counts, and what it leaves behind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna import Varuna
from varuna.errors import PeerLost
from varuna.execute.step.engine import Engine, MicroBatchJob, TrainingStep
from varuna.execute.step.scatter import MicroBatch
from varuna.execute.update.reduce import Reducer, TiedParameter
from varuna.types import Work

CPU = torch.device("cpu")


class SlowEvent:
    """Plays an event of CUDA, behind work that ends when it has been asked three times."""

    log: list[str]

    def __init__(self) -> None:
        self.times = 0

    def record(self, stream: object) -> None:
        self.log.append(f"record on {stream}")

    def query(self) -> bool:
        self.times += 1
        self.log.append("done" if self.times == 3 else "busy")
        return self.times == 3


def test_a_step_counts_only_when_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOT-3: NCCL's reductions are done for torch when they are queued, and a lost rank makes them wrong."""
    log = SlowEvent.log = []

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().mean()

    x = torch.randn(4, 3)
    wrapped = Varuna(Mean(), "0;", {"x": x}, batch_size=4, chunk_size=2, device="cpu")
    trainer: Any = wrapped._trainer

    def wait(done: Any) -> None:
        while not done():
            pass

    def reduced(*_: object) -> None:  # the rest of the step sees a GPU
        monkeypatch.setattr(trainer.engine, "device", torch.device("cuda", 0))

    monkeypatch.setattr(torch.cuda, "Event", SlowEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(trainer.session, "waiter", SimpleNamespace(for_device=wait))
    monkeypatch.setattr(trainer.losses, "handle", reduced)
    trainer.commit = SimpleNamespace(begin=lambda: None, finish=lambda totals: log.append("commit"))
    options = {"num_samples": 4, "dims": {"x": 0}, "training": True, "max_norm": None}
    trainer.step({"x": x}, loss_scale=wrapped._loss_scale, **options)
    assert log == ["record on the stream of cuda:0", "busy", "busy", "done", "commit"]
    trainer.commit.begin = lambda: log.append("begin")
    trainer._early_commit()()
    assert "begin" not in log


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("plain", ["begin", "finish"]),
        ("norm", ["measure", "begin", "clip", "finish"]),
        ("hook", ["hook", "begin", "finish"]),
        ("infinite loss", ["finish"]),
        ("batch norm", ["finish"]),
    ],
)
def test_a_commit_begins_early_only_if_no_other_rank_is_needed_afterwards(
    case: str, expected: list[str]
) -> None:
    """HOT-3: a rank that has begun and is lost in a later wait would leave the others without its part."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.norm = nn.BatchNorm1d(2) if case == "batch norm" else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x)).square().mean()

    x = torch.randn(4, 3)
    wrapped = Varuna(Mean(), "0;", {"x": x}, batch_size=4, chunk_size=2, device="cpu", on_nan="warn")
    log = list[str]()
    if case == "hook":
        next(iter(wrapped.parameters())).register_hook(lambda gradient: log.append("hook"))
    trainer: Any = wrapped._trainer
    measure, clip = trainer.reducer._norm, trainer.reducer._clip
    trainer.reducer._norm = lambda: log.append("measure") or measure()
    trainer.reducer._clip = lambda *numbers: log.append("clip") or clip(*numbers)
    trainer.commit = SimpleNamespace(
        begin=lambda: log.append("begin"), finish=lambda totals: log.append("finish")
    )
    trainer.step(
        {"x": x * torch.inf if case == "infinite loss" else x},
        num_samples=4,
        dims={"x": 0},
        training=True,
        loss_scale=wrapped._loss_scale,
        max_norm=1.0 if case == "norm" else None,
    )
    assert log == expected


class LostPeer:
    """Plays the link to a rank that is gone."""

    ready, over, took_frozen, peer = 0, False, False, 0

    def send(self, tensors: object, *, frozen: bool = False) -> None:
        raise PeerLost("rank 0 is lost")


def raise_at_once(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("is_whole_step", [True, False])
def test_a_loss_in_the_last_backward_leaves_no_hooks_of_the_reduction(is_whole_step: bool) -> None:
    """HOT-3: parameters with hooks of an earlier reducer could not go on in place."""
    parameter = nn.Parameter(torch.ones(2))
    stage: Any = SimpleNamespace(
        backward=lambda number, incoming, **_: [torch.ones(1)],
        held={0: SimpleNamespace(trains=True, edges=[1])},
    )
    waiter: Any = SimpleNamespace(raise_cause=raise_at_once)
    upstream: Any = LostPeer()
    engine = Engine(stage, index=1, stages=2, upstream=upstream, downstream=None, waiter=waiter, device=CPU)
    microbatch = MicroBatch(0, 1, 1.0, {})
    jobs = [MicroBatchJob(microbatch, SimpleNamespace(received=(), sent=()), Work(0, 0, 0))]  # type: ignore[arg-type]

    def expect() -> Any:
        return parameter.register_post_accumulate_grad_hook(lambda _: None).remove

    with pytest.raises(PeerLost, match="rank 0 is lost"):
        if is_whole_step:
            step = TrainingStep(jobs, frozenset(), ("B", 0), [1.0], lambda loss: None, expect)
            step.losses.append(torch.ones(()))
            engine._run_backward(step, "B", 0)
        else:
            engine.backwards(jobs, [[torch.ones(())]], again=False, before_last=expect)
    assert not parameter._post_accumulate_grad_hooks


def test_all_reductions_of_tied_weights_are_known_after_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOT-3: gloo may never end one of them, and freeing its group would wait for it."""
    started: list[object] = []

    def start(tensor: Tensor, **_: object) -> object:
        started.append(tensor)
        return tensor

    def wait(work: object, _: object) -> None:
        raise PeerLost("rank 1 is lost")

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    group: Any = object()
    monkeypatch.setattr(dist, "all_reduce", start)
    waiter: Any = SimpleNamespace(for_work=wait)
    ties = [TiedParameter(one, group, counts_here=True, num_stages=2) for one in parameters]
    reducer = Reducer(parameters, None, group, counts_norm=True, waiter=waiter, ties=ties)
    with pytest.raises(PeerLost):
        reducer.reduce_gradients()
    assert len(started) == 2
    found = reducer.unfinished_works()
    assert [id(one) for one in found] == [id(one) for one in started]
    monkeypatch.setattr(waiter, "for_work", lambda work, what: None)
    reducer.reduce_gradients()
    assert not reducer.unfinished_works()
