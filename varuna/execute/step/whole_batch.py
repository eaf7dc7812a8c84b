"""Totals of the whole batch that the loss divides by, such as counted labels: summed before a step.

Each rank sums them over its own samples. The replicas of a stage exchange their sums, and every micro-batch
gets the total as one more input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from varuna.execute.step.engine import MicroBatchJob
from varuna.execute.step.scatter import cut
from varuna.execute.step.stage import StageProgram
from varuna.types import LOSS_TOTALS


def own_totals(
    programs: Mapping[int, StageProgram],  # by size of the micro-batch
    inputs: Mapping[str, object],  # of all samples of this rank
    num_samples: int,
    *,
    dims: Mapping[str, int],
    length: int,
    tensor: Callable[[str], Tensor],  # returns a buffer by name
    device: torch.device,
) -> Tensor:
    """Return the totals over this rank's samples. A program for one sample knows no other size."""
    if not num_samples:
        return torch.zeros(length, dtype=torch.float64)
    program = programs[max(programs)]
    assert program.totals is not None
    if max(programs) > 1:
        return program.totals(tensor, inputs, num_samples, device)
    parts = cut(inputs, dims, 1, num_samples)
    return torch.stack([program.totals(tensor, part, 1, device) for part in parts]).sum(0)


def with_totals(jobs: Sequence[MicroBatchJob], totals: Tensor | None) -> list[MicroBatchJob]:
    """Return the jobs with the totals among their inputs."""
    if totals is None:
        return list(jobs)
    return [
        replace(
            job, microbatch=replace(job.microbatch, inputs={**job.microbatch.inputs, LOSS_TOTALS: totals})
        )
        for job in jobs
    ]
