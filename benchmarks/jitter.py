"""Slow links on purpose, the same for both sides: a message is held back, the computing is not.

Our links have this built in (`link_delay`). For torch's schedules the sends of a batch of point-to-point
operations are taken out and handed to a thread, which starts each `isend` when its time has come; the
schedule goes on at once, as it would with a network that has taken the bytes. It does not even wait
for the receiver to be ready, which torch's own send over gloo does: what differs, favours torch.
On both sides messages to one neighbour keep their order.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules

DRAWN = 4096


@dataclass(frozen=True)
class Jitter:
    """Exponentially distributed delays: many short ones, now and then a long one."""

    mean_seconds: float
    seed: int = 5

    def of_rank(self, rank: int) -> Callable[[int], float]:
        """The delay of a rank's message by its number; both sides are given the same sequence."""
        generator = random.Random(self.seed * 1000 + rank)
        delays = [generator.expovariate(1 / self.mean_seconds) for _ in range(DRAWN)]
        return lambda index: delays[index % DRAWN]


class Sent:
    """Stands in for a send's Work: the network has the message."""

    def wait(self, *_: object) -> bool:
        return True


class HeldBack:
    """While entered, torch's pipeline schedules of this process send through a thread that delays."""

    def __init__(self, delay: Callable[[int], float]) -> None:
        self._delay = delay
        self._sent: dict[int, int] = {}
        self._last: dict[int, float] = {}
        self._waiting: dict[int, deque[tuple[float, Any]]] = {}
        self._works: list[Any] = []
        self._condition = threading.Condition()
        self._closed = False
        self._original = schedules._batch_p2p
        self._thread = threading.Thread(target=self._run, name="held-back", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        schedules._batch_p2p = self._batch  # type: ignore[assignment]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        schedules._batch_p2p = self._original
        with self._condition:
            while any(self._waiting.values()):
                self._condition.wait()
            works, self._works = self._works, []
        for work, _ in works:
            work.wait()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._thread.join()

    def _batch(self, operations: list[Any], desc: str | None = None) -> list[Any]:
        sends = [operation for operation in operations if operation.op is dist.isend]
        works = self._original([o for o in operations if o.op is not dist.isend], desc)
        for send in sends:
            self._hold(send)
        return [*works, *(Sent() for _ in sends)]

    def _hold(self, send: Any) -> None:
        peer = send.group_peer
        with self._condition:
            number = self._sent.get(peer, 0)
            self._sent[peer] = number + 1
            release = max(self._last.get(peer, 0.0), time.monotonic() + self._delay(number))
            self._last[peer] = release
            self._waiting.setdefault(peer, deque()).append((release, send))
            self._condition.notify_all()

    def _run(self) -> None:
        with self._condition:
            while not self._closed:
                now = time.monotonic()
                due = [queue for queue in self._waiting.values() if queue and queue[0][0] <= now]
                for queue in due:
                    _, send = queue.popleft()
                    work = send.op(send.tensor, group=send.group, tag=send.tag, group_dst=send.group_peer)
                    self._works.append((work, send.tensor))
                if due:
                    self._condition.notify_all()
                    continue
                heads = [queue[0][0] for queue in self._waiting.values() if queue]
                self._condition.wait(min(heads) - now if heads else None)
