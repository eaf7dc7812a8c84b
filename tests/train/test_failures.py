"""When a worker fails, dies or hangs: every rank ends, soon, and names the culprit."""

import itertools
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import Pool, TaskFailed
from tests.tasks import make_optimizer, stage_map
from tests.toys import Plain, make_inputs, make_model
from varuna import Varuna, opaque
from varuna.errors import PeerHangs, PeerLost, VarunaError, WorkerError


class Grumpy(nn.Module):
    """Fails, in user code, on the second rank's third micro-batch."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1 and torch.is_grad_enabled() and not x.is_meta and type(x) is Tensor:
            Grumpy.calls += 1
            if Grumpy.calls == 3:
                raise ZeroDivisionError("the user's own error")
        return x * 2


class Fragile(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.grumpy = opaque(Grumpy())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i < len(self.cuts):
                x = self.cuts[i](x)
        return nn.functional.mse_loss(self.grumpy(x), y)


def wrap(
    depth: int, width: int, timeout_seconds: float = 30, model: nn.Module | None = None, **options: Any
) -> Varuna:
    inputs = make_inputs("Plain", 2, torch.Generator())
    options |= {"device": "cpu", "timeout_seconds": timeout_seconds}
    wrapped = Varuna(model or Plain(), stage_map(depth, width), inputs, 8, 1, **options)
    wrapped.set_optimizer(make_optimizer("sgd", wrapped.parameters()))
    return wrapped


def batch(width: int) -> dict[str, Any]:
    return make_inputs("Plain", 8 // width, torch.Generator().manual_seed(3))


@pytest.mark.parametrize("slow_seconds", [0.0, 1.0])
def test_an_exception_reaches_the_user_as_itself_and_the_others_with_its_traceback(
    pool: Pool, slow_seconds: float
) -> None:
    """V33, B7: with rank, stage and micro-batch, not as a broken connection.

    A slow neighbour is still computing when the failed rank has said why and gone: it meets the end
    of the connection first, when it sends.
    """
    others, failed = pool.run(fail_in_user_code, 2, slow_seconds)
    assert failed[0] == "ZeroDivisionError" and "on rank 1: stage 1, micro-batch 2, forward" in failed[1]
    assert others[0] == "WorkerError"
    for expected in (
        "rank 1 (stage 1, replica 0)",
        "micro-batch 2",
        "ZeroDivisionError: the user's own error",
        'raise ZeroDivisionError("the user',
    ):
        assert expected in others[1]


def fail_in_user_code(slow_seconds: float) -> tuple[str, str]:
    Grumpy.calls = 0
    slow = dist.get_rank() == 0
    wrapped = wrap(
        2, 1, model=Fragile(), compute_delay=lambda op, _: slow_seconds if slow and op == "F" else 0.0
    )
    try:
        wrapped.step(batch(1))
    except Exception as error:
        wrapped.close()
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("nothing failed")


@pytest.mark.parametrize(("depth", "width"), [(3, 1), (1, 2)])
def test_a_killed_worker_is_named_by_all_others(depth: int, width: int) -> None:
    """V33: seen as a closed connection, told to those who had none.

    The workers' own timeout of 600 s is far beyond the pool's patience: nobody waits for it.
    """
    pool = Pool()
    try:
        with pytest.raises(TaskFailed) as failed:
            pool.run(kill_the_last, depth * width, depth, width)
        last = depth * width - 1
        text = str(failed.value)
        assert f"--- rank {last}:\nthe process died" in text
        for rank in range(last):
            part = text.split(f"--- rank {rank}:")[1].split("--- rank")[0]
            assert "PeerLost" in part and f"rank {last} (stage" in part
    finally:
        pool.close()


def kill_the_last(depth: int, width: int) -> None:
    wrapped = wrap(depth, width, timeout_seconds=600)
    wrapped.step(batch(width))
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        wrapped.step(batch(width))


@pytest.mark.parametrize("how", ["stopped", "asleep"])
def test_a_hanging_worker_is_named_after_the_timeout(how: str) -> None:
    """V33, B7: a stopped process, and one whose main thread does not come back."""
    pool = Pool()
    try:
        with pytest.raises(TaskFailed) as failed:
            pool.run(hang_the_middle, 3, how, timeout=60, grace=4)
        text = str(failed.value)
        assert "PeerHangs" in text and "rank 1 (stage 1, replica 0) hangs" in text
    finally:
        pool.close()


def hang_the_middle(how: str) -> None:
    wrapped = wrap(3, 1, timeout_seconds=4)
    wrapped.step(batch(1))
    if dist.get_rank() == 1:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(3600)
    wrapped.step(batch(1))


def test_models_that_differ_between_ranks_are_refused_on_all(pool: Pool) -> None:
    """V7: by the fingerprint, before a step could mix them."""
    for message in pool.run(wrap_another, 2):
        assert "another model" in message


def wrap_another() -> str:
    with pytest.raises((VarunaError, ValueError)) as refused:
        wrap(2, 1, model=Plain(layers=4 + dist.get_rank()))
    return str(refused.value)


def test_a_refusal_by_one_rank_reaches_those_that_are_tied_to_it(pool: Pool) -> None:
    """V33: at once, and not when they have waited in vain for it to join them."""
    for message in pool.run(wrap_with_a_hook, 3):
        assert "the model computes the loss differently when it is called again" in message


def wrap_with_a_hook() -> str:
    model = make_model("Paired")
    counter = itertools.count(1)  # baked into the graph, so the check on rank 0 refuses the model
    model.get_submodule("late").register_forward_hook(lambda _module, _args, out: out * next(counter))
    sample = make_inputs("Paired", 2, torch.Generator())
    with pytest.raises(Exception) as refusal:
        Varuna(model, "0;1;2;", sample, 4, 2, device="cpu", from_cache=False)
    return str(refusal.value)


def test_errors_are_one_family() -> None:
    """B7: whoever catches WorkerError catches the loss and the hang of a peer too."""
    assert issubclass(PeerLost, WorkerError) and issubclass(PeerHangs, WorkerError)
    assert issubclass(WorkerError, VarunaError) and issubclass(WorkerError, RuntimeError)
