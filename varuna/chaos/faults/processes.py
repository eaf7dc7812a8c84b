"""Faults of processes: kill, stop and signal workers, agents, whole machines and the manager."""

import os
import signal
from contextlib import suppress

from varuna.chaos.injector import Injector, pause
from varuna.chaos.job import KEPT, SAVING, JobStuck, within_patience
from varuna.chaos.machines import process_name, signal_all

STOP_SECONDS = 3.0
"""Longer than the limit for silent machines."""


def kill_worker(run: Injector) -> None:
    (machine,) = run.at_work()
    run.happens("kill -9 of the worker of", machine)
    run.kill_worker(machine)
    run.recovers()


def kill_agent(run: Injector) -> None:
    (machine,) = run.at_work()
    run.happens("kill -9 of the agent of", machine)
    os.kill(run.agent_pid(machine), signal.SIGKILL)
    run.recovers()


def kill_machine(run: Injector) -> None:
    machines = run.at_work()
    run.happens("the end of", *machines)
    run.lose_and_bring_back(machines, dies=True)


def kill_store(run: Injector) -> None:
    """Kill the store of the next generation, or that of the running one."""

    def stores_of(number: int) -> list[int]:
        processes = run.all_machines[number].processes()
        return [pid for pid in processes if process_name(pid) == "varuna-store"]

    run.at_work()
    found = {number: stores for number in range(len(run.all_machines)) if (stores := stores_of(number))}
    number = run.random.choice(sorted(found))
    # The running store has connections of all ranks.
    stores = sorted(found[number], key=lambda pid: len(os.listdir(f"/proc/{pid}/fd")))
    which = run.random.choice(["spare", "running"])
    run.happens(f"kill -9 of a {which} store on", run.all_machines[number])
    os.kill(stores[0 if which == "spare" else -1], signal.SIGKILL)
    run.job.wait_for(lambda line: ("store" in line and "has ended" in line) or "store ended" in line)
    run.recovers(restarts=False)


def stop_worker(run: Injector) -> None:
    """Stop a worker for a while. Nothing must restart."""
    (machine,) = run.at_work()
    run.happens("SIGSTOP of a worker, and SIGCONT after a while, on", machine)
    pid = run.worker_pid(machine)
    os.kill(pid, signal.SIGSTOP)
    pause(run.request.seconds or STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    run.recovers(restarts=False)


def hang_worker(run: Injector) -> None:
    """Stop a worker for which another one waits: one alone may do anything between two steps, for long."""
    machine, *_ = run.at_work(min(2, len(run.listing.addresses())), phase="running")
    run.happens("SIGSTOP for good of the worker of", machine)
    os.kill(run.worker_pid(machine), signal.SIGSTOP)
    run.recovers()


def stop_agent(run: Injector) -> None:
    (machine,) = run.at_work()
    run.happens("SIGSTOP of the agent of", machine)
    pid = run.agent_pid(machine)
    run.outlive(
        [machine],
        lambda: os.kill(pid, signal.SIGSTOP),
        repair=lambda: signal_all([pid], signal.SIGCONT),
    )


def stop_machine(run: Injector) -> None:
    (machine,) = run.at_work()
    run.happens("SIGSTOP of all processes of", machine)
    pids = list(machine.processes())
    run.outlive(
        [machine],
        lambda: signal_all(pids, signal.SIGSTOP),
        repair=lambda: signal_all(pids, signal.SIGCONT),
    )


def terminate_agent(run: Injector) -> None:
    (machine,) = run.at_work()
    run.happens("SIGTERM to the agent of", machine)
    os.kill(run.agent_pid(machine), signal.SIGTERM)
    run.recovers()


# ---------------------------------------------------------------- the manager


def kill_manager(run: Injector) -> None:
    """Kill the manager; the job must train on without it."""
    run.at_work()
    run.job.wait_for_steps(1)  # a generation whose start was not sent to all machines cannot train
    run.happens("kill -9 of the manager")
    run.job.kill_manager()
    seen = len(run.job.steps)
    for _ in within_patience(
        "nothing is trained without the manager", seconds=run.job.patience_seconds, pause_seconds=0.02
    ):
        run.job.read_steps()
        if run.job.morphing or len(run.job.steps) >= seen + 2:
            break
    run.resume_manager()


def stop_manager(run: Injector) -> None:
    run.happens("SIGSTOP of the manager, and SIGCONT after a while")
    run.job.process.send_signal(signal.SIGSTOP)
    pause(run.request.seconds or STOP_SECONDS)
    run.job.process.send_signal(signal.SIGCONT)
    run.recovers(restarts=False)


def kill_manager_while_morphing(run: Injector) -> None:
    """Kill it after it has requested a save; the job must continue afterwards."""
    (machine,) = run.at_work()
    seconds = run.random.choice([0.0, 0.1, 0.3, 1.0])
    run.happens(f"kill -9 of the manager {seconds:g} s after it wanted to leave", machine)
    run.listing.remove(machine)
    kept = KEPT in run.job.wait_for_morph(SAVING)
    pause(seconds)
    run.job.kill_manager()
    run.listing.add(machine)
    run.resume_manager(restarts=not kept)


def kill_manager_and_machine(run: Injector) -> None:
    (machine,) = run.at_work()
    dies = run.any_death()
    run.happens("kill -9 of the manager, and the end of", machine)
    pids = list(machine.processes())  # without a manager, nobody knows those of a loopback machine
    run.job.process.kill()
    if dies:
        signal_all(pids, signal.SIGKILL)
    run.lose([machine], dies=dies)
    run.job.wait_for_ended()
    run.job.start("--resume")
    run.job.wait_for("is resumed")
    run.bring_back([machine], died=dies)
    run.recovers(restarts=dies)


def stop_job(run: Injector) -> None:
    """Send SIGUSR1 to the manager or to a worker, which saves and ends; then start the job again."""
    (machine,) = run.at_work()
    run.job.wait_for_steps(2)  # a worker that joins does not listen yet
    to_manager = run.random.random() < 0.5
    run.happens(f"SIGUSR1 to {'the manager' if to_manager else f'the worker of {machine.name}'}")
    if to_manager:
        run.job.process.send_signal(signal.SIGUSR1)
    else:
        os.kill(run.worker_pid(machine), signal.SIGUSR1)
    code = run.job.wait_for_ended()
    if code != 0 or "varuna: stopped: " not in run.job.text:
        raise JobStuck(f"the job has ended with status {code}, not by a stop")
    run.job.start_again()
    run.recovers()
