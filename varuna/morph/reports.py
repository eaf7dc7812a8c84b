"""Reports of all workers of a generation, and questions about them.

`decide` keeps the last report of each worker. Thousands of simulated workers report the same but for their
rank: `SameReports` holds such a report once.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from functools import cached_property

import msgspec

from varuna.morph.state import Generation, WorkerProgress

Reports = Mapping[str, tuple[WorkerProgress, ...]]
"""The reports of each machine."""


class SameReports(Mapping[str, tuple[WorkerProgress, ...]]):
    """One report for all workers of a generation. Each worker's own is made when it is looked up."""

    def __init__(
        self,
        worker: WorkerProgress,
        generation: Generation,
        *,
        missing: Collection[str] = (),
        changed: Reports | None = None,
    ) -> None:
        """`missing`: machines that have not reported. `changed`: machines with reports of their own."""
        self.worker, self.generation = worker, generation
        self.missing, self.changed = frozenset(missing), changed or {}

    def __getitem__(self, machine: str) -> tuple[WorkerProgress, ...]:
        if machine in self.changed:
            return self.changed[machine]
        if machine in self.missing:
            raise KeyError(machine)
        return tuple(
            [msgspec.structs.replace(self.worker, rank=r) for r in self.generation.ranks_of[machine]]
        )

    def __contains__(self, machine: object) -> bool:
        return machine in self.changed or (
            machine in self.generation.ranks_of and machine not in self.missing
        )

    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, self.generation.machines)

    def __len__(self) -> int:
        return len(self.generation.machines) - len(self.missing - self.changed.keys())

    @cached_property
    def others(self) -> list[str]:
        """Machines that have not reported this."""
        return list(filter((self.missing | self.changed.keys()).__contains__, self.generation.machines))

    @cached_property
    def count(self) -> int:
        """Number of workers that have reported this."""
        ranks_of = self.generation.ranks_of
        return sum(map(len, self.generation.ranks)) - sum(len(ranks_of[machine]) for machine in self.others)


def merge_reports(known: Reports, newer: Reports, *, without: Collection[str] = ()) -> Reports:
    """Return the reports with newer ones, without those of some machines of the generation."""
    changed = newer if not isinstance(known, SameReports) else {**known.changed, **newer}
    if isinstance(known, SameReports):
        changed = {name: found for name, found in changed.items() if name not in without}
        return SameReports(
            known.worker, known.generation, missing={*known.missing, *without}, changed=changed
        )
    return {name: found for name, found in {**known, **changed}.items() if name not in without}


def distinct_reports(reports: Reports) -> list[WorkerProgress]:
    """Return all reports, but only one of those that differ in nothing but their rank."""
    if isinstance(reports, SameReports):
        same = [reports.worker] if len(reports.others) < len(reports.generation.machines) else []
        return [*distinct_reports(reports.changed), *same]
    return [worker for found in reports.values() for worker in found]


def total_of_reports(reports: Reports, number: Callable[[WorkerProgress], int]) -> int:
    """Return the sum of a number that each worker reports."""
    if isinstance(reports, SameReports):
        return reports.count * number(reports.worker) + total_of_reports(reports.changed, number)
    return sum([number(worker) for found in reports.values() for worker in found])


def reported_machines(reports: Reports) -> Set[str]:
    if isinstance(reports, SameReports):
        return (reports.generation.machine_set - reports.missing) | reports.changed.keys()
    return reports.keys()


def machines_that_fail(
    reports: Reports, generation: Generation, passes: Callable[[WorkerProgress], bool]
) -> Iterator[str]:
    """Yield the machines of a generation with a rank that has no report, or whose report does not pass."""
    machines, ranks_of = generation.machines, generation.ranks_of
    if isinstance(reports, SameReports) and reports.generation is generation and passes(reports.worker):
        machines = tuple(reports.others)
    for machine in machines:
        found = {worker.rank for worker in reports.get(machine, ()) if passes(worker)}
        if not found.issuperset(ranks_of[machine]):
            yield machine
