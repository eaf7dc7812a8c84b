"""Forked processes: results and errors come back, also of processes that die or hang."""

import os
import signal
import time

from varuna.errors import CaptureError, PeerLost
from varuna.verification.children import Channel, Child, run_alone, run_together


def test_results_errors_and_deaths_come_back() -> None:
    """B1, PRO-1"""

    def killed(channel: Channel) -> bytes:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    def refused(channel: Channel) -> bytes:
        raise CaptureError("not this model")

    def echo(channel: Channel) -> bytes:
        raise PeerLost("another rank")

    fine, dead, refusal, second = run_together(
        [lambda channel: channel.receive(), killed, refused, echo],
        timeout_seconds=60,
        relay=lambda children: children[0].channel.send(b"hello"),
    )
    assert fine.value == b"hello" and fine.error is None
    assert dead.error is not None and "SIGKILL" in dead.error.text and "last words" in dead.error.text
    assert refusal.error is not None and refusal.error.is_refusal and not refusal.error.is_echo
    assert second.error is not None and second.error.is_echo


def test_a_process_that_hangs_is_ended() -> None:
    """B1, PRO-1: and nothing is left behind."""

    def hang() -> bytes:
        time.sleep(3600)
        return b""

    answer = run_alone(hang, timeout_seconds=0.1)
    assert answer.error is not None and answer.error.kind == "Timeout"
    child = Child(lambda channel: channel.receive())
    child.end()
    try:
        os.kill(child.pid, 0)
        raise AssertionError("the process lives")
    except ProcessLookupError:
        pass
