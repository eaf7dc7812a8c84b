"""Faults of machines and links: cut off, slow, several at once, in the middle of a change."""

from varuna.chaos.injector import Injector, as_host, pause
from varuna.chaos.job import GENERATION, SAVING


def cut_link(run: Injector) -> None:
    machines = run.at_work()
    run.happens("a cut to", *machines)
    run.lose_and_bring_back(machines, dies=False)


def slow_link(run: Injector) -> None:
    (machine,) = run.at_work()
    rate = run.request.rate or "256kbit"
    run.happens(f"a link of {rate}/s to", machine)
    host = as_host(machine)
    host.slow(rate)
    try:
        run.recovers(restarts=False)
        run.job.wait_for_steps(20)
    finally:
        host.unslow()


def lose_two_machines(run: Injector) -> None:
    machines = run.at_work(min(2, len(run.machines("at work"))))
    dies = run.any_death()
    run.happens("the end of" if dies else "a cut to", *machines)
    run.lose_and_bring_back(machines, dies=dies)


def lose_all_machines(run: Injector) -> None:
    dies = run.any_death()
    machines = list(run.all_machines)
    run.random.shuffle(machines)
    some = run.random.randint(run.stages, max(run.stages, len(machines) - 1))
    run.at_work()
    run.happens("the end of all" if dies else "a cut to all")
    run.lose(machines, dies=dies)
    run.job.wait_for("generation ended")
    run.bring_back(machines[:some], died=dies)
    run.recovers()
    run.bring_back(machines[some:], died=dies)


def lose_machine_while_morphing(run: Injector) -> None:
    """Lose it when the workers save, when they restart, or shortly before or after."""
    leaver, *others = run.at_work(min(2, len(run.machines("at work"))))
    sign = run.random.choice([SAVING, GENERATION])
    seconds = run.random.choice([0.0, 0.05, 0.2, 0.5])
    dies = run.any_death()
    victims = others or [leaver]
    run.happens(f"while morphing ({sign.split()[1]} + {seconds:g} s), the end of", *victims)
    run.listing.remove(leaver)
    run.job.wait_for_morph(sign)
    pause(seconds)
    run.lose(victims, dies=dies)
    if others:  # otherwise it may have left before it was lost
        run.job.wait_for(f"machine lost: {victims[0].address}")
    run.bring_back(victims, died=dies)
    run.listing.add(leaver)
    run.recovers()
