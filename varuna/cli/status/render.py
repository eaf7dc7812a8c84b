"""Draws the view of a job: as a few lines for a live display, or as one plain line."""

import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from varuna.cli.options import printable
from varuna.observe.job_view import EventView, JobView, MachineView
from varuna.units import count, memory

MOST_MACHINES = 8
"""Rows of the table of machines; the rest is counted."""
MOST_SCALARS = 4
"""Values of `varuna.log` that are shown."""
OUTPUT_LINES = 4
"""Lines of a low terminal that stay free for the output of workers."""
COLUMNS: Mapping[str, Callable[[MachineView], Text]] = {
    "machine": lambda machine: Text(printable(machine.name)),
    "state": lambda machine: state_text(machine),
    "ranks": lambda machine: Text(ranks_text(machine.ranks)),
    "step s": lambda machine: Text(seconds_text(machine.step_seconds)),
    "compute s": lambda machine: Text(seconds_text(machine.compute_seconds)),
    "wait s": lambda machine: Text(seconds_text(machine.wait_seconds)),
    "memory": lambda machine: Text(memory_text(machine)),
}
COLUMN_GAP = 2
LESS_IMPORTANT = ("wait s", "compute s", "ranks", "memory", "step s")
"""Columns that a narrow terminal lacks, the first of them first."""
PHASE_STYLES = {"running": "green", "over": "bold", "gathering": "yellow"}


def plain_line(view: JobView) -> str:
    """Return the status as one line: "step 12 of 300, loss 0.31, 45 samples/s, ..."."""
    parts = [
        view.phase if view.phase != "running" else "",
        progress_text(view),
        f"loss {loss_text(view.loss)}" if view.step and view.has_loss else "",
        *speeds(view),
        view.layout.text if view.layout is not None else "",
        machines_text(view.machines),
        f"{clock(view.eta_seconds)} left" if view.eta_seconds is not None else "",
        save_text(view),
        changes_text(view),
    ]
    return ", ".join(filter(None, parts))


def live_status(view: JobView, *, height: int = 40, width: int = 120, num_events: int = 1) -> Group:
    """Return the status as a block of lines, with the last events.

    A low terminal gets fewer lines, a narrow one fewer columns.
    """
    title = Text.assemble(
        ("── ", "dim"),
        (printable(view.job), "bold"),
        "  ",
        (view.phase, PHASE_STYLES.get(view.phase, "yellow")),
        f" for {clock(view.phase_seconds)}",
        (f"  {printable(view.reason)}" if view.phase != "running" else "", "dim"),
    )
    lines: list[Text | Table] = [title, bar(view)]
    if view.step:
        numbers = [*speeds(view), *scalar_texts(view)]
        if view.has_loss:
            lines.append(Text.assemble(("loss ", "dim"), (loss_text(view.loss), "bold"), *pairs(numbers)))
        elif numbers:
            lines.append(Text("   ".join(numbers)))
    if view.layout is not None:
        lines.append(
            Text.assemble(
                ("layout ", "dim"), view.layout.text, *pairs([f"generation {view.layout.generation}"])
            )
        )
    goodput = view.ledger.goodput if view.ledger is not None and view.ledger.steps else None
    facts = [save_text(view), changes_text(view), f"goodput {goodput:.1%}" if goodput is not None else ""]
    if any(facts):
        lines.append(Text("   ".join(filter(None, facts))))
    others = len(lines) + len(view.problems) + 3  # header and rest of the table, last event
    rows = min(MOST_MACHINES, height - others - OUTPUT_LINES)
    free = height - others - OUTPUT_LINES - min(len(view.machines), MOST_MACHINES)
    known = view.events or (() if view.last_event is None else (view.last_event,))
    events = known[-max(1, min(num_events, free)) :]
    if rows > 0:
        lines.append(machine_table(view.machines, rows, width=width))
    else:
        lines.append(Text(machines_text(view.machines)))
    for topic, why in view.problems.items():
        lines.append(Text(f"{topic}: {printable(why)}", style="red"))
    for event in events[:-1]:
        lines.append(Text.assemble("           ", event_text(event)))
    if events:
        lines.append(Text.assemble(("last event ", "dim"), event_text(events[-1])))
    for line in lines:
        if isinstance(line, Text):
            line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def bar(view: JobView) -> Table | Text:
    if view.num_steps is None:
        return Text(progress_text(view))
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    eta = "" if view.eta_seconds is None else f"{clock(view.eta_seconds)} left"
    done = min(view.step, view.num_steps)
    share = f"{done / view.num_steps:.0%}" if view.num_steps else ""
    grid.add_row(progress_text(view), ProgressBar(view.num_steps, done), f"{share}  {eta}")
    return grid


def machine_table(machines: Sequence[MachineView], rows: int, *, width: int) -> Table:
    """Return a table of so many machines; those that need attention come first.

    If it is wider than `width`, the columns of `LESS_IMPORTANT` are left out, one after the other.
    """
    ordered = sorted(machines, key=lambda machine: machine.state == "at work" and not machine.slow)
    cells = {name: [text_of(machine) for machine in ordered[:rows]] for name, text_of in COLUMNS.items()}
    if rest := ordered[rows:]:
        for name, column in cells.items():
            counts = {"machine": f"and {len(rest)} more", "state": machines_text(rest, "")}
            column.append(Text(counts.get(name, "")))
    widths = {name: max([len(name), *map(len, column)]) for name, column in cells.items()}
    shown = list(COLUMNS)
    for name in LESS_IMPORTANT:
        if sum(widths[one] + COLUMN_GAP for one in shown) > width:
            shown.remove(name)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, COLUMN_GAP, 0, 0))
    for name in shown:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in zip(*(cells[name] for name in shown), strict=True):
        table.add_row(*row)
    return table


def state_text(machine: MachineView) -> Text:
    state = f"{machine.state}, slow" if machine.slow else machine.state
    return Text(printable(state), style="" if state == "at work" else "yellow")


def progress_text(view: JobView) -> str:
    of = f" of {view.num_steps:,}" if view.num_steps is not None else ""
    return f"step {view.step:,}{of}" if view.step or of else "no step yet"


def speeds(view: JobView) -> list[str]:
    """Return samples, tokens, utilisation and time per step, as far as they are known."""
    found = []
    if view.samples_per_second is not None:
        found.append(f"{amount(view.samples_per_second)} samples/s")
    if view.tokens_per_second is not None:
        found.append(f"{amount(view.tokens_per_second)} tokens/s")
    if view.mfu is not None:
        found.append(f"MFU {view.mfu:.1%}")
    if view.step_seconds and view.samples_per_second is not None:
        found.append(f"{seconds_text(view.step_seconds)} s/step")
    return found


def scalar_texts(view: JobView) -> list[str]:
    """Return the values that the script has logged."""
    shown = list(view.scalars.items())[:MOST_SCALARS]
    return [f"{printable(name)} {loss_text(value)}" for name, value in shown]


def save_text(view: JobView) -> str:
    """Return the newest checkpoint and the time until the next one."""
    if not view.store:
        return ""
    saved = "nothing saved" if view.saved_step is None else f"saved step {view.saved_step:,}"
    wait = view.next_save_seconds
    return saved if wait is None else f"{saved}, next save in {clock(wait)}"


def changes_text(view: JobView) -> str:
    found = [count(view.morphs, "morph")] if view.morphs else []
    if view.losses:
        found.append(f"{view.losses} lost" if view.losses == 1 else f"{view.losses} losses")
    return ", ".join(found)


def machines_text(machines: Sequence[MachineView], noun: str = "machine") -> str:
    """Return the number of machines in each state: "4 machines: 3 at work, 1 lost"."""
    states: dict[str, int] = {}
    for machine in machines:
        states[machine.state] = states.get(machine.state, 0) + 1
    found = ", ".join(f"{number} {printable(state)}" for state, number in states.items())
    if not noun:
        return found
    total = count(len(machines), noun)
    return total if list(states) in ([], ["at work"]) else f"{total}: {found}"


def event_text(event: EventView) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    return f"{at} {printable(event.what)}: {printable(' '.join(event.why.split()))}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in short: "0-3, 8"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"


def memory_text(machine: MachineView) -> str:
    if machine.memory_bytes is None:
        return "-"
    limit = f" of {memory(machine.memory_limit)}" if machine.memory_limit else ""
    return f"{memory(machine.memory_bytes)}{limit}"


def loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.5g}"


def seconds_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3g}"


def amount(number: float) -> str:
    """Return a number in short: "950", "12.3 k", "4.56 M"."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 10 * scale or (unit != "k" and number >= scale):
            return f"{number / scale:.3g} {unit}"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def clock(seconds: float) -> str:
    """Return "0:07", "12:31", "3:12:10" or "2 d 03:12"."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def pairs(texts: Sequence[str]) -> list[str]:
    return [f"   {text}" for text in texts]
