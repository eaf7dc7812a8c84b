"""The table of all faults, by the name that `varuna chaos` and its scripts use."""

from collections.abc import Callable
from typing import NamedTuple

from varuna.chaos.faults import files, machines, membership, processes
from varuna.chaos.injector import Injector


class FaultKind(NamedTuple):
    """One kind of fault."""

    inject: Callable[[Injector], None]
    meaning: str
    needs_hosts: bool = False
    options: tuple[str, ...] = ()  # fields of `FaultRequest` that it reads
    is_slow: bool = False  # takes a minute: a random choice has it at most once


MACHINE = ("machine",)
TIMED = ("machine", "seconds")

FAULTS: dict[str, FaultKind] = {
    "kill-worker": FaultKind(processes.kill_worker, "kill -9 of a worker", options=MACHINE),
    "kill-agent": FaultKind(processes.kill_agent, "kill -9 of an agent", options=MACHINE),
    "kill-machine": FaultKind(
        processes.kill_machine, "kill -9 of all processes of a machine", options=MACHINE
    ),
    "kill-manager": FaultKind(processes.kill_manager, "kill -9 of the manager, then `--resume`"),
    "kill-manager-while-morphing": FaultKind(
        processes.kill_manager_while_morphing, "kill -9 of the manager in a change of machines"
    ),
    "kill-manager-and-machine": FaultKind(
        processes.kill_manager_and_machine, "kill -9 of the manager and of a machine", options=MACHINE
    ),
    "kill-store": FaultKind(processes.kill_store, "kill -9 of a store of this or the next generation"),
    "stop-worker": FaultKind(
        processes.stop_worker, "SIGSTOP of a worker, SIGCONT after 3 s or `seconds`", options=TIMED
    ),
    "stop-agent": FaultKind(
        processes.stop_agent, "SIGSTOP of an agent until the job goes on without it", options=MACHINE
    ),
    "stop-machine": FaultKind(
        processes.stop_machine, "SIGSTOP of all processes of a machine, as above", options=MACHINE
    ),
    "stop-manager": FaultKind(
        processes.stop_manager,
        "SIGSTOP of the manager, SIGCONT after 3 s or `seconds`",
        options=("seconds",),
    ),
    "stop-job": FaultKind(processes.stop_job, "SIGUSR1: the job saves and ends; then `--resume`"),
    "hang-worker": FaultKind(
        processes.hang_worker, "SIGSTOP of a worker for good", options=MACHINE, is_slow=True
    ),
    "terminate-agent": FaultKind(
        processes.terminate_agent, "SIGTERM to an agent, as before a preemption", options=MACHINE
    ),
    "notice": FaultKind(
        membership.notice,
        "a notice of 20 s or `seconds`; then the machine dies, and comes back",
        options=TIMED,
    ),
    "drain": FaultKind(membership.drain, "`varuna drain`; then the machine is listed again", options=MACHINE),
    "leave": FaultKind(
        membership.leave, "a machine is taken off the list, for good or for `seconds`", options=TIMED
    ),
    "join": FaultKind(
        membership.join,
        "a machine that left is listed again; if none did, one leaves before",
        options=MACHINE,
    ),
    "flap": FaultKind(membership.flap, "a machine is taken off the list and put back, again and again"),
    "break-list": FaultKind(membership.break_list, "the machine list becomes empty or invalid"),
    "lose-two-machines": FaultKind(machines.lose_two_machines, "two machines are lost at once"),
    "lose-all-machines": FaultKind(machines.lose_all_machines, "all machines are lost at once"),
    "lose-machine-while-morphing": FaultKind(
        machines.lose_machine_while_morphing, "a machine is lost in a change of machines"
    ),
    "flip-checkpoint": FaultKind(files.flip_checkpoint, "one bit of the newest checkpoint changes"),
    "cut-journal": FaultKind(files.cut_journal, "the manager dies, and its journal loses its end"),
    "cut-link": FaultKind(
        machines.cut_link, "no packet reaches or leaves a machine", needs_hosts=True, options=MACHINE
    ),
    "slow-link": FaultKind(
        machines.slow_link,
        "a link of 256 kbit/s or `rate` for 20 steps",
        needs_hosts=True,
        options=("machine", "rate"),
    ),
    "fill-disk": FaultKind(
        files.fill_disk, "the disk for logs of a machine is full", needs_hosts=True, options=MACHINE
    ),
}
