"""Plans a job for any number of machines, as `varuna run` does, and keeps the plans."""

import time
from collections.abc import Mapping
from functools import cached_property
from itertools import compress
from typing import NamedTuple

from varuna.errors import VarunaError
from varuna.morph.run.worker_env import ranks_of_machines
from varuna.morph.state import MachinePlan
from varuna.plan.search.choose import Choice, LayoutRequest, choose
from varuna.types import Layout


def machine_plan(
    choice: Choice,
    machines: tuple[str, ...],
    *,
    devices_per_machine: int,
    plan: str = "",
    environment: Mapping[str, str] | None = None,
) -> MachinePlan:
    """Return the layout of a choice, with the ranks of each machine."""
    ranks = ranks_of_machines(choice.layout, len(machines), devices_per_machine=devices_per_machine)
    return MachinePlan(
        machines,
        tuple(compress(machines, ranks)),
        tuple(filter(None, ranks)),
        choice.layout,
        plan=plan,
        environment=environment or {},
        reasons=choice.reasons,
    )


class SizedPlan(NamedTuple):
    """The plan for a number of machines."""

    layout: Layout | None
    step_seconds: float
    used: tuple[int, ...]  # machines that have ranks, by position
    ranks: tuple[tuple[int, ...], ...]
    plan: str
    problem: str


class CachedPlanner:
    """Plans each number of machines once."""

    def __init__(
        self, request: LayoutRequest, *, devices_per_machine: int, steps: Mapping[int, float] | None = None
    ) -> None:
        """Without a profile, `steps` gives the step time of some numbers of machines.

        Times of others follow from the devices that the layouts use: idle ones make no step faster.
        """
        self._request = request
        self._devices = devices_per_machine
        self._steps = dict(steps or {})
        self._plans: dict[int, SizedPlan] = {}
        self._ranks: dict[
            tuple[int, ...], tuple[int, ...]
        ] = {}  # shared by plans: ten thousand machines each
        self.planning_seconds = 0.0  # time that all plans took

    def plan(self, machines: tuple[str, ...]) -> MachinePlan:
        found = self.size(len(machines))
        if found.layout is None:
            return MachinePlan(machines, problem=found.problem)
        used = tuple(map(machines.__getitem__, found.used))
        return MachinePlan(machines, used, found.ranks, found.layout, plan=found.plan)

    def size(self, num_machines: int) -> SizedPlan:
        if num_machines not in self._plans:
            started = time.perf_counter()
            self._plans[num_machines] = self._make(num_machines)
            self.planning_seconds += time.perf_counter() - started
        return self._plans[num_machines]

    @property
    def num_plans(self) -> int:
        return len(self._plans)

    def _make(self, num_machines: int) -> SizedPlan:
        try:
            choice = choose(self._request, num_machines=num_machines, devices_per_machine=self._devices)
        except (VarunaError, ValueError) as error:
            return SizedPlan(None, 0.0, (), (), "", str(error))
        places = ranks_of_machines(choice.layout, num_machines, devices_per_machine=self._devices)
        used, taken = tuple(compress(range(num_machines), places)), tuple(filter(None, places))
        if choice.proposal is not None:
            seconds, text = choice.proposal.forecast.seconds, str(choice.proposal.plan)
        else:
            seconds, text = self._measured(choice.layout.num_ranks), ""
        shared = tuple(map(self._ranks.setdefault, taken, taken))
        return SizedPlan(choice.layout, seconds, used, shared, text, "")

    def _measured(self, num_ranks: int) -> float:
        """Return the step time of the nearest number of ranks that was measured, scaled to this one."""
        if not self._steps:
            raise ValueError(
                "the time of a step is not known (give --profile DIR, --step-seconds or --calibrate)"
            )
        known = self._steps_by_ranks
        nearest = min(known, key=lambda number: abs(number - num_ranks))
        return known[nearest] * nearest / num_ranks

    @cached_property
    def _steps_by_ranks(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for machines, seconds in sorted(self._steps.items()):
            found.setdefault(self._used_by(machines), seconds)
        return found

    def _used_by(self, num_machines: int) -> int:
        """Return the ranks of the layout for a number of machines; of one that is too small, the least."""
        try:
            found = choose(self._request, num_machines=num_machines, devices_per_machine=self._devices)
        except (VarunaError, ValueError):
            return max(num_machines * self._devices, self._request.num_stages or 1)
        return found.layout.num_ranks
