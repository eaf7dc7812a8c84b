"""Tells the manager that a machine is about to be taken away, so that all is saved before it is."""

import os
import socket
import time

from varuna.environment import VarunaEnvironment
from varuna.morph.protocol.messages import PreemptionReport, write_message

ANSWER_SECONDS = 5.0


def notify_manager_preempt(
    not_before: float | None = None,
    *,
    seconds: float | None = None,
    machine: str = "",
    reason: str = "it will be preempted",
    code_dir: str = ".",
) -> None:
    """The machine goes at `not_before` (seconds since 1970), or `seconds` from now; else some time.

    Called in a worker, or in what a worker has started, it is about this machine unless another is named.
    Elsewhere, on the manager's machine, the machine must be named, and the job found by its `code_dir`.
    """
    if not_before is not None and seconds is not None:
        raise ValueError("not_before and seconds say the same thing (give one of them)")
    if not_before is not None:
        seconds = max(0.0, not_before - time.time())
    agent = VarunaEnvironment.read(os.environ).agent_socket
    if agent:
        _tell_agent(agent, PreemptionReport(seconds, reason, machine))
        return
    if not machine:
        raise ValueError("which machine? (outside of a job's workers it must be named: machine='10.0.0.7')")
    from varuna.morph.run.client import request_manager

    answer = request_manager(code_dir, "preempt", machine=machine, seconds=seconds, why=reason)
    if not answer.ok:
        raise ValueError(answer.text)


def _tell_agent(name: str, notice: PreemptionReport) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect("\0" + name)
        connection.sendall(write_message(notice) + b"\n")
        answer = connection.makefile().readline().strip()
    if answer != "ok":
        raise ConnectionError(f"the notice was not passed on: {answer or 'no answer'}")
