"""The door to planning: class `AutoConfig`, which picks depth and micro-batch for any number of GPUs.

Imports no torch, and needs no device: everything is in the profile.
"""

import os
import sys

from varuna.plan.profile_file import read_profile
from varuna.plan.search.search import Ranking, search
from varuna.types import Cluster, Machine, in_few


class AutoConfig:
    """Plans from a profile that `Profiler` made.

        auto = AutoConfig(num_gpus=64, gpus_per_vm=4, batch_size=8192, profile_folder="profiles")
        depth, microbatch_size, seconds = auto.get_min()

    `batch_times` and `micro_batch` tell the seconds of a step and the micro-batch for each pipeline depth;
    `ranking` has all there is to know: whole plans with their forecasts, and what was refused, and why.
    """

    def __init__(
        self,
        num_gpus: int,
        gpus_per_vm: int,
        batch_size: int,
        profile_folder: str | os.PathLike[str],
        gpu_memory_capacity: int | None = None,  # bytes; that of the profiled device, if not given
        verbose: bool = True,
        autofill_missing_compute: bool = False,  # sizes that some segments did not run with are estimated
    ) -> None:
        profile = read_profile(profile_folder)
        memory_bytes = profile.device_memory_bytes if gpu_memory_capacity is None else gpu_memory_capacity
        self.cluster = equal_machines(num_gpus, gpus_per_vm, memory_bytes=memory_bytes)
        self.ranking: Ranking = search(
            profile, self.cluster, batch_size=batch_size, fill_in=autofill_missing_compute, every_depth=True
        )
        slowest_first = reversed(self.ranking.proposals)  # so that of two of a depth the faster one counts
        by_depth = sorted(slowest_first, key=lambda proposal: proposal.plan.depth)
        self.batch_times = {proposal.plan.depth: proposal.forecast.seconds for proposal in by_depth}
        self.micro_batch = {proposal.plan.depth: proposal.plan.microbatch_size for proposal in by_depth}
        if verbose:
            print(self, file=sys.stderr)

    def get_min(self) -> tuple[int, int, float]:
        """(pipeline depth, micro-batch size, seconds of a step) of the fastest layout.

        Where its stages differ in their number of replicas (`ranking.best.plan.uneven`), only the plan itself
        says which: launch that.
        """
        best = self.ranking.best
        return best.plan.depth, best.plan.microbatch_size, best.forecast.seconds

    def __str__(self) -> str:
        lines = [f"{self.cluster}:"]
        for proposal in self.ranking.proposals:
            plan = proposal.plan
            lines.append(
                f"  {plan.depth} x {in_few(plan.widths)}, "
                f"micro-batches of {plan.microbatch_size}, {plan.schedule}: "
                f"{proposal.forecast.seconds:.4g} s ({proposal.reason})"
            )
        lines += [f"  {refused}" for refused in self.ranking.refused]
        lines += [f"  estimated: {what}" for what in self.ranking.best.forecast.estimates]
        return "\n".join(lines)


def equal_machines(num_gpus: int, gpus_per_vm: int, *, memory_bytes: int) -> Cluster:
    """As many machines as it takes; the last may have fewer."""
    for name, number in (
        ("num_gpus", num_gpus),
        ("gpus_per_vm", gpus_per_vm),
        ("gpu_memory_capacity", memory_bytes),
    ):
        if number < 1:
            raise ValueError(f"{name} must be 1 or more, not {number}")
    whole, rest = divmod(num_gpus, gpus_per_vm)
    sizes = [gpus_per_vm] * whole + ([rest] if rest else [])
    return Cluster(tuple(Machine(f"vm{index}", size, memory_bytes) for index, size in enumerate(sizes)))
