"""The ledger of a job: every paid machine-second belongs to exactly one cause.

`varuna.morph.accounting` fills it from the manager's state, for real jobs and for simulated ones.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from varuna.units import count

Cause = Literal["useful", "saving", "redoing", "morphing", "waiting", "idle"]
"""
    useful    training: steps that count
    saving    training stands still for a checkpoint
    redoing   steps that were interrupted, and steps that are run again
    morphing  from the end of one generation to the first step of the next
    waiting   the machine starts, or the job waits for machines
    idle      the layout has no use for the machine, or for some of its devices
"""
CAUSES: tuple[Cause, ...] = ("useful", "saving", "redoing", "morphing", "waiting", "idle")
LOST = CAUSES[1:]
HOUR = 3600.0
ROUNDING = 1e-9
"""Parts of a sum that are no more than its error."""
MOST_PRICE = 1e9
"""Largest price of a machine-hour."""
MOST_NAMES = 8
"""Machines without a price that are named."""


InterruptionKind = Literal["start", "change", "loss"]
"""start: of the job; change: after a save; loss: without one."""


class Interruption(msgspec.Struct, kw_only=True):
    """One interruption of the training, and its cost."""

    at: float  # seconds since 1970, or since the start of a trace
    why: str
    kind: InterruptionKind
    machines: int = 0  # with workers, at that time
    lost: dict[str, float] = {}  # machine-seconds by cause
    seconds: dict[str, float] = {}  # from the first sign to the next step, by part

    def add(self, cause: Cause, machine_seconds: float) -> None:
        self.lost[cause] = self.lost.get(cause, 0.0) + machine_seconds

    @property
    def total(self) -> float:
        return sum(self.lost.values())


class LayoutPeriod(msgspec.Struct, kw_only=True):
    """One generation: its start and its layout."""

    at: float
    generation: int
    layout: str
    machines: int  # with workers
    first_step_at: float | None = None
    step_seconds: float = 0.0  # the last one


class Shares(msgspec.Struct):
    """Paid machines by what happens to their time now; parts of machines count as fractions."""

    working: float = 0.0
    between: float = 0.0  # ready, but no generation runs
    waiting: float = 0.0
    idle: float = 0.0
    between_cause: Cause = "waiting"


class Account(msgspec.Struct, kw_only=True):
    """Machine-seconds of all machines, or of those with one price."""

    amounts: dict[str, float] = {}  # booked machine-seconds by cause
    # The open account: a restarted manager continues from here.
    shares: Shares = msgspec.field(default_factory=Shares)
    pending: float = 0.0  # of machines with workers, since the last finished step

    def add(self, cause: Cause, machine_seconds: float) -> None:
        self.amounts[cause] = self.amounts.get(cause, 0.0) + machine_seconds


class Ledger(Account, kw_only=True):
    """The account of a job so far; all times are in seconds, amounts in machine-seconds."""

    begun_at: float = 0.0
    at: float = 0.0  # all machine-seconds before this time are booked
    machines: dict[str, float] = {}  # paid seconds of each machine, until it left
    paid_since: dict[str, float] = {}  # machines that are paid now
    interruptions: list[Interruption] = []
    periods: list[LayoutPeriod] = []
    num_machines: list[tuple[float, int]] = []  # paid machines over time: (since, count)
    steps: int = 0  # that count
    steps_redone: int = 0
    samples: int = 0
    saves: int = 0
    save_seconds: float = 0.0  # of all automatic saves
    write_seconds: float = 0.0  # after that, until they were complete: training went on
    step_seconds: float = 0.0  # the last one
    first_join_seconds: list[float] = []  # of agents that started before the first generation did
    join_seconds: list[float] = []  # of the others: from the start of an agent until its machine is ready
    prices: dict[str, float] = {}  # per machine-hour, by name or pattern
    on_demand_price: float = 0.0
    by_price: dict[float, Account] = {}  # parts of this account, where the prices of machines differ
    priced: dict[str, float] = {}  # the prices that divide the machines among `by_price`

    # As the open account above.
    phase: str = "gathering"
    generation: int = 0
    iteration: int = 0
    best_iteration: int = 0
    saved_step: int = -1
    has_stepped: bool = False  # this generation has finished a step
    missing_samples: int = 0  # of the workers so far: they are not in `samples`
    holding: bool = False  # survivors of a loss hold their state until another machine joins
    connected: set[str] = set()  # machines that have, or had, an agent: not paid without one


class Money(msgspec.Struct, frozen=True, kw_only=True):
    """The bill. `on_demand` is what the same training costs on machines that are never taken away."""

    paid: float
    useful: float
    lost: dict[str, float]
    per_million_samples: float | None
    on_demand: float | None  # None: no on-demand price is known
    unpriced: tuple[str, ...] = ()  # machines that no price fits: they count as free
    averaged_seconds: float = 0.0  # machine-seconds of which the causes have the machines' mean price


class LedgerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `varuna ledger --json`, and of `varuna simulate --trace --json` for each policy."""

    begun_at: float
    seconds: float
    paid_seconds: float
    useful_seconds: float
    lost_seconds: dict[str, float]
    goodput: float  # useful / paid
    machines: int  # that were paid at some time
    machines_now: int
    steps: int
    steps_redone: int
    samples: int
    saves: int
    interruptions: int
    generations: int
    money: Money | None
    worst: tuple[Interruption, ...] = ()  # the most expensive ones


class Accounts(dict[float | None, Account]):
    """The accounts to book in: the ledger itself (None), and one for each price, if its prices differ."""

    def __init__(self, ledger: Ledger) -> None:
        prices = ledger.prices
        differ = bool(prices) and ("*" not in prices or len(set(prices.values())) > 1)
        if not differ or list(prices.items()) != list(ledger.priced.items()):
            ledger.priced = dict(prices) if differ else {}
            ledger.by_price = {price: Account() for price in (0.0, *prices.values())} if differ else {}
        super().__init__({None: ledger})
        for price, account in ledger.by_price.items():
            self[price] = account
        self._priced = ledger.priced
        self._prices: dict[str, float] = {}  # of machines, as far as they were asked for

    def price_of(self, machine: str) -> float:
        price = self._prices.get(machine)
        if price is None:
            price = self._prices[machine] = price_of(machine, self._priced) or 0.0
        return price

    def of_price(self, price: float | None, machines: Iterable[str]) -> list[str]:
        """Return those of the machines that are in this account."""
        return [name for name in machines if price is None or self.price_of(name) == price]


def amounts_by_cause(ledger: Ledger) -> dict[Cause, float]:
    """Return all machine-seconds so far; the open account counts as training, or as the start of it."""
    return _amounts_of(ledger, ledger)


def _amounts_of(account: Account, ledger: Ledger) -> dict[Cause, float]:
    amounts = {cause: account.amounts.get(cause, 0.0) for cause in CAUSES}
    amounts["useful" if ledger.has_stepped else "morphing"] += account.pending
    return amounts


def paid_seconds(ledger: Ledger) -> dict[str, float]:
    """Return the paid seconds of each machine so far."""
    paid = dict(ledger.machines)
    for name, since in ledger.paid_since.items():
        paid[name] = paid.get(name, 0.0) + ledger.at - since
    return paid


def price_of(machine: str, prices: Mapping[str, float]) -> float | None:
    """Return the price of a machine-hour: by its name, else by the first pattern that fits; None: none."""
    if machine in prices:
        return prices[machine]
    return next((price for pattern, price in prices.items() if fnmatchcase(machine, pattern)), None)


def report_ledger(ledger: Ledger, *, num_worst: int = 10) -> LedgerReport:
    amounts, paid = amounts_by_cause(ledger), paid_seconds(ledger)
    total = sum(paid.values())
    worst = sorted(ledger.interruptions, key=lambda one: -one.total)[:num_worst]
    return LedgerReport(
        begun_at=ledger.begun_at,
        seconds=ledger.at - ledger.begun_at,
        paid_seconds=total,
        useful_seconds=amounts["useful"],
        lost_seconds={cause: amounts[cause] for cause in LOST},
        goodput=amounts["useful"] / total if total else 0.0,
        machines=len(paid),
        machines_now=len(ledger.paid_since),
        steps=ledger.steps,
        steps_redone=ledger.steps_redone,
        samples=ledger.samples,
        saves=ledger.saves,
        interruptions=sum(one.kind != "start" for one in ledger.interruptions),
        generations=len(ledger.periods),
        money=_money(ledger, paid, amounts) if ledger.prices else None,
        worst=tuple(worst),
    )


def _money(ledger: Ledger, paid: Mapping[str, float], amounts: Mapping[Cause, float]) -> Money:
    found = {name: price_of(name, ledger.prices) for name in paid}
    bill = sum(seconds * (found[name] or 0.0) for name, seconds in paid.items()) / HOUR
    costs = dict.fromkeys(CAUSES, 0.0)
    rest = dict(amounts)  # machine-seconds that are in no account with a known price
    for booked, price in _prices_of_accounts(ledger, found).items():
        for cause, seconds in _amounts_of(ledger.by_price[booked], ledger).items():
            costs[cause] += seconds * price / HOUR
            rest[cause] -= seconds
    averaged = sum(rest.values())
    if averaged > ROUNDING * sum(paid.values()):
        mean = (bill - sum(costs.values())) / averaged
        costs = {cause: cost + rest[cause] * mean for cause, cost in costs.items()}
    else:
        averaged = 0.0
    useful = amounts["useful"]
    return Money(
        paid=bill,
        useful=costs["useful"],
        lost={cause: costs[cause] for cause in LOST},
        per_million_samples=bill / ledger.samples * 1e6 if ledger.samples else None,
        on_demand=useful / HOUR * ledger.on_demand_price if ledger.on_demand_price else None,
        unpriced=tuple(sorted(name for name, price in found.items() if price is None)),
        averaged_seconds=averaged if len(set(found.values())) > 1 else 0.0,
    )


def _prices_of_accounts(ledger: Ledger, prices: Mapping[str, float | None]) -> dict[float, float]:
    """Return today's price of each account in `by_price`; {}: machines of one account differ today."""
    found: dict[float, float] = {}
    for name, price in prices.items() if ledger.by_price else ():
        booked = price_of(name, ledger.priced) or 0.0
        if found.setdefault(booked, price or 0.0) != (price or 0.0):
            return {}
    return found


def describe_averaged(money: Money | None) -> str:
    """Say which part of the money by cause is no exact sum over machines; "" if all of it is."""
    if money is None or not money.averaged_seconds:
        return ""
    return (
        f"the causes of {hours(money.averaged_seconds)} have the mean price of the machines: the job did not "
        f"have these prices then (give --price to `varuna run`)"
    )


def describe_unpriced(money: Money | None) -> str:
    """Name the machines that no price fits; "" if there are none."""
    if money is None or not money.unpriced:
        return ""
    names, more = money.unpriced[:MOST_NAMES], len(money.unpriced) - MOST_NAMES
    listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
    return f"no price for {listed}: counted as free (add lines MACHINE,PRICE or *,PRICE to --price)"


def ledger_lines(report: LedgerReport) -> list[str]:
    """Return the ledger as a few lines of text."""
    if not report.paid_seconds:
        return ["ledger: no machine was paid yet"]
    lost = [
        f"{cause} {seconds / report.paid_seconds:.1%}"
        for cause, seconds in report.lost_seconds.items()
        if seconds >= 5e-4 * report.paid_seconds
    ]
    lines = [
        f"ledger: {report.goodput:.1%} of {hours(report.paid_seconds)} trained"
        + (f"; lost: {', '.join(lost)}" if lost else "")
        + f"; {count(report.interruptions, 'interruption')}, {count(report.steps, 'step')}"
        + (f", {report.steps_redone} run again" if report.steps_redone else "")
    ]
    if (money := report.money) is not None:
        against = ""
        if money.on_demand is not None:
            against = f"; on demand, the same training costs {money.on_demand:.2f}"
        each = money.per_million_samples
        samples = f", {each:.2f} per million samples" if each is not None else ""
        lines.append(
            f"money: {money.paid:.2f}, of which {money.paid - money.useful:.2f} lost{samples}{against}"
        )
        if missing := describe_unpriced(money):
            lines.append(f"money: {missing}")
        if averaged := describe_averaged(money):
            lines.append(f"money: {averaged}")
    return lines


def hours(machine_seconds: float) -> str:
    if machine_seconds < HOUR:
        return f"{machine_seconds:.0f} machine-seconds"
    return f"{machine_seconds / HOUR:,.1f} machine-hours"


def read_prices(text: str, *, source: str) -> dict[str, float]:
    """Parse a price per machine-hour ("0.92"), or lines "MACHINE,PRICE" where * stands for any letters."""
    try:
        return {"*": _price(text.strip())}
    except ValueError:
        if "," not in text:
            raise ValueError(f"{source}: expected a price per machine-hour, found {text[:80]!r}") from None
    prices: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        row = line.split("#")[0].strip()
        if not row or (not prices and row.replace(" ", "").lower() == "machine,price"):
            continue
        name, comma, amount = (part.strip() for part in row.rpartition(","))
        try:
            if not comma or not name:
                raise ValueError
            prices[name] = _price(amount)
        except ValueError:
            raise ValueError(
                f"{source}, line {number}: expected MACHINE,PRICE with a price per hour, found {line[:80]!r}"
            ) from None
    if not prices:
        raise ValueError(f"{source} names no price (write lines MACHINE,PRICE)")
    return prices


def _price(text: str) -> float:
    price = float(text)
    if not 0 <= price <= MOST_PRICE:
        raise ValueError("a price is 0 or more")
    return price
