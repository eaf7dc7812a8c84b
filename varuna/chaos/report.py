"""The result of a chaos run: every fault, the losses, what was left behind, and a verdict."""

from typing import Literal

import msgspec
from rich.console import Console

from varuna.chaos.injector import InjectedFault
from varuna.chaos.leftovers import Leftovers
from varuna.chaos.undisturbed import LossComparison
from varuna.observe.ledger import LedgerReport, ledger_lines
from varuna.plan import tables
from varuna.units import count

Outcome = Literal["finished", "stopped", "failed", "stuck"]
"""
    finished  the script ended by itself
    stopped   the time was over: the job saved and ended
    failed    the job ended with an error
    stuck     no step came after a fault
"""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `varuna chaos --json`."""

    outcome: Outcome
    problem: str  # why it failed or is stuck
    seed: int
    machines: int
    seconds: float
    steps: int
    generations: int
    faults: tuple[InjectedFault, ...]
    steps_redone: int
    samples_redone: int
    losses: LossComparison | None  # None: the job has trained no step
    left_behind: Leftovers
    ledger: LedgerReport | None = None
    notes: tuple[str, ...] = ()
    needs_faults: bool = True  # False: of a trace in which no machine comes or goes

    @property
    def verdict(self) -> str:
        problems = []
        if self.outcome in ("failed", "stuck"):
            problems.append(f"the job {'is stuck' if self.outcome == 'stuck' else 'failed'}: {self.problem}")
        if self.losses is None or not self.losses.equal:
            problems.append("the losses differ from those of the undisturbed run")
        if not self.left_behind.clean:
            problems.append("something was left behind")
        if self.needs_faults and not any(fault.happened for fault in self.faults):
            problems.append("no fault has happened, so nothing is proven (let the script train for longer)")
        return "; ".join(problems) or "equal and clean"

    @property
    def exit_code(self) -> int:
        return 0 if self.verdict == "equal and clean" else 1

    def show(self, console: Console) -> None:
        table = tables.table("at s>", "fault", "what", "next step s>", "steps redone>", "samples redone>")
        for fault in self.faults:
            table.add_row(
                f"{fault.at:.1f}",
                fault.fault,
                fault.what,
                "-" if fault.seconds is None else f"{fault.seconds:.2f}",
                str(fault.steps_redone),
                str(fault.samples_redone),
            )
        console.print(table)
        for line in self.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def lines(self) -> list[str]:
        """Return all but the table of faults."""
        found = [
            f"job: {self.outcome} after {self.seconds:.0f} s, {count(self.steps, 'step')}, "
            f"{count(self.generations, 'generation')}; {count(self.steps_redone, 'step')} run again "
            f"({self.samples_redone} samples)"
        ]
        found += [f"note: {note}" for note in self.notes]
        if left_out := [fault.fault for fault in self.faults if not fault.happened]:
            found.append(f"note: {', '.join(left_out)} did not happen: see the table")
        if self.ledger is not None:
            found += ledger_lines(self.ledger)
        found.append(f"losses: {describe_losses(self.losses)}")
        left = self.left_behind.lines()
        found += [f"left behind: {line}" for line in left] or ["left behind: nothing"]
        return [*found, f"verdict: {self.verdict}"]


def describe_losses(found: LossComparison | None) -> str:
    if found is None:
        return "not compared"
    worst = f"largest relative difference {found.worst:.1e}"
    if found.first_different is not None:
        return (
            f"different from step {found.first_different} on: {found.job_loss:.8g}, undisturbed "
            f"{found.plain_loss:.8g} ({worst} at step {found.worst_step}, tolerance {found.tolerance:g})"
        )
    if found.missing:
        return f"{count(len(found.missing), 'step')} were not recorded, the first is {found.missing[0]}"
    return f"equal in {count(found.steps, 'step')} ({worst}, tolerance {found.tolerance:g})"
