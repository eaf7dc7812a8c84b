"""Faults of the machine list and of markets: machines join, leave, flap, are drained or taken back."""

from varuna.chaos.injector import Injector, pause
from varuna.chaos.job import KEPT, SAVING

NOTICE_SECONDS = 20.0


def leave(run: Injector) -> None:
    """Take a machine off the list. If others cannot replace it, it stays."""
    machines = run.at_work()
    run.happens("taken off the list:", *machines)
    left = run.enough_without(machines)
    run.listing.remove(*machines)
    if left:
        run.recovers()  # an earlier change may have been under way
        run.wait_until_left(machines)
    else:
        run.job.wait_for(KEPT)
        run.recovers(restarts=False)
    if run.request.seconds is not None:
        pause(run.request.seconds)
        run.listing.add(*machines)


def join(run: Injector) -> None:
    """Put a machine on the list; if all are there, one leaves first."""
    if not run.listing.off:
        leave(run)
    machine = run.listing.off[0]
    if run.request.machine is not None and run.all_machines[run.request.machine - 1] in run.listing.off:
        machine = run.all_machines[run.request.machine - 1]
    was_kept = machine in run.machines("at work")
    run.happens("put on the list:", machine)
    run.listing.add(machine)
    run.recovers(restarts=not was_kept)


def flap(run: Injector) -> None:
    """Take a machine off the list and put it back, again and again."""
    (machine,) = run.at_work()
    times = run.random.randint(2, 4)
    run.happens(f"taken off the list and put back {times} times:", machine)
    for _ in range(times):
        run.listing.remove(machine)
        pause(run.random.choice([0.2, 1.0, 2.0]))
        run.listing.add(machine)
        pause(run.random.choice([0.2, 1.0]))
    run.recovers(restarts=False)


def break_list(run: Injector) -> None:
    """Write an empty or invalid list, or each machine twice: the manager only logs it."""
    addresses = run.listing.addresses()
    text, log_line = run.random.choice(
        [
            ("", "list ignored"),
            ("\0\1 rm -rf\n-oProxyCommand=no\n", "is not a machine address"),
            ("\n".join([*addresses, *addresses]) + "\n", "appears more than once"),
        ]
    )
    run.happens(f"a list that reads {text[:20]!r}")
    run.listing.write_text(text)
    run.job.wait_for(log_line)
    run.recovers(restarts=False)
    run.listing.add()


def notice(run: Injector) -> None:
    """The job drops the machine before the deadline of the notice; then the machine dies and comes back."""
    (machine,) = run.at_work()
    seconds = run.request.seconds or NOTICE_SECONDS
    run.happens(f"a notice of {seconds:g} s for", machine)

    def go_and_return() -> None:
        machine.kill()
        run.bring_back([machine], died=True)

    run.outlive(
        [machine],
        lambda: run.job.request("drain", machine=machine.address, seconds=seconds, why="a notice"),
        repair=go_and_return,
        sign=SAVING,
    )


def drain(run: Injector) -> None:
    """Drain a machine without a deadline; then put it on the list again."""
    (machine,) = run.at_work()
    run.happens("drain of", machine)
    left = run.enough_without([machine])
    run.job.request("drain", machine=machine.address, why="drained")
    if left:
        run.recovers()
    run.listing.remove(machine)
    pause(2.0)  # the manager reads the list several times a second
    run.listing.add(machine)
    if not left:
        run.recovers(restarts=False)
