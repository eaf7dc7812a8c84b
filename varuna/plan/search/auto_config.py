"""`AutoConfig`: chooses pipeline depth and micro-batch size for any number of GPUs.

It needs a profile, but no device, and does not import torch.
"""

import os
import sys

from varuna.plan.cluster_file import equal_machines, read_network, with_links
from varuna.plan.profile_file import read_profile
from varuna.plan.search.search import Ranking, search
from varuna.types import show_widths


class AutoConfig:
    """Plans for a cluster, made from a profile that `Profiler` wrote.

        auto = AutoConfig(num_gpus=64, gpus_per_vm=4, batch_size=8192, profile_folder="profiles")
        depth, microbatch_size, seconds = auto.get_min()

    `batch_times` and `micro_batch` map each pipeline depth to the seconds of a step and the micro-batch
    size. `ranking` has the whole plans with their forecasts, and why other depths do not fit.
    """

    def __init__(
        self,
        num_gpus: int,
        gpus_per_vm: int,
        batch_size: int,
        profile_folder: str | os.PathLike[str],
        gpu_memory_capacity: int | None = None,  # bytes; None: as the profiled device
        verbose: bool = True,
        autofill_missing_compute: bool = False,  # estimate micro-batch sizes that some segments did not run
        network: str = "",  # bandwidth between machines, such as "25Gbit"; empty: as measured
        latency: str = "",  # of that network, such as "50us"; empty: 20us
    ) -> None:
        profile = read_profile(profile_folder)
        memory_bytes = profile.device_memory_bytes if gpu_memory_capacity is None else gpu_memory_capacity
        self.cluster = equal_machines(num_gpus, gpus_per_vm, memory_bytes=memory_bytes)
        assumed = read_network(network, latency, keys=("network", "latency"))
        self.ranking: Ranking = search(
            with_links(profile, self.cluster, assumed, example='network="25Gbit", latency="20us"'),
            self.cluster,
            batch_size=batch_size,
            fill_in=autofill_missing_compute,
            every_depth=True,
        )
        slowest_first = reversed(self.ranking.proposals)  # of two with one depth, the faster one comes last
        by_depth = sorted(slowest_first, key=lambda proposal: proposal.plan.depth)
        self.batch_times = {proposal.plan.depth: proposal.forecast.seconds for proposal in by_depth}
        self.micro_batch = {proposal.plan.depth: proposal.plan.microbatch_size for proposal in by_depth}
        if verbose:
            print(self, file=sys.stderr)

    def get_min(self) -> tuple[int, int, float]:
        """Return (pipeline depth, micro-batch size, seconds of a step) of the fastest layout.

        If `ranking.best.plan.uneven`, its stages have different numbers of replicas: launch the plan itself.
        """
        best = self.ranking.best
        return best.plan.depth, best.plan.microbatch_size, best.forecast.seconds

    def __str__(self) -> str:
        lines = [f"{self.cluster}:"]
        for proposal in self.ranking.proposals:
            plan = proposal.plan
            lines.append(
                f"  {plan.depth} x {show_widths(plan.widths)}, "
                f"micro-batches of {plan.microbatch_size}, {plan.schedule}: "
                f"{proposal.forecast.seconds:.4g} s ({proposal.reason})"
            )
        lines += [f"  {refused}" for refused in self.ranking.refused]
        lines += [f"  estimated: {note}" for note in self.ranking.best.forecast.estimates]
        return "\n".join(lines)
