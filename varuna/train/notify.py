"""Preemption notices from a script: the manager saves before the machine is taken away."""

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
    """Report that a machine will be preempted at `not_before` (seconds since 1970), or in `seconds`.

    Without a time, the machine may disappear at any moment. In a worker or its child processes, the default
    is this machine. On the manager's machine, name the `machine` and the job's `code_dir`.
    """
    if not_before is not None and seconds is not None:
        raise ValueError("not_before and seconds exclude each other (pass one of them)")
    if not_before is not None:
        seconds = max(0.0, not_before - time.time())
    agent = VarunaEnvironment.read(os.environ).agent_socket
    if agent:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect("\0" + agent)
            connection.sendall(write_message(PreemptionReport(seconds, reason, machine)) + b"\n")
            received = connection.makefile().readline().strip()
        if received != "ok":
            raise ConnectionError(f"the agent did not accept the notice: {received or 'no answer'}")
        return
    if not machine:
        raise ValueError("machine is missing (outside of a job's workers, pass machine='10.0.0.7')")
    from varuna.morph.run.client import request_manager

    answer = request_manager(code_dir, "preempt", machine=machine, seconds=seconds, why=reason)
    if not answer.ok:
        raise ValueError(answer.text)
