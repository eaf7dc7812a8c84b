"""Whether all stages were given the same samples in the same order, and all replicas samples of their own.

A sample's inputs come to each stage by another rank's data loader. Loaders that shuffle each by itself would
pair the features of one sample with the label of another, and nobody would notice; so would, where stages
differ in their number of replicas, one that deals samples out otherwise than in order. So the first
batch is looked at. Replicas that all load the same data train as well, on a batch that is smaller than it
seems.
"""

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from varuna.execute.comm.frames import memory_of, to_host

Hashes = Mapping[str, Sequence[bytes]]
"""For each input, one of every sample."""


def hash_samples(inputs: Mapping[str, object], dims: Mapping[str, int]) -> dict[str, list[bytes]]:
    found = {}
    for name, dim in dims.items():
        value = inputs[name]
        if isinstance(value, Tensor):
            samples = to_host(value.detach().movedim(dim, 0))
            found[name] = [hashlib.blake2b(memory_of(s), digest_size=8).digest() for s in samples.unbind()]
    return found


def hash_batch(inputs: Mapping[str, object]) -> dict[str, list[bytes]]:
    """As if it were one sample, where nobody knows yet along which dimensions the samples lie; none where it
    is empty."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if any(not tensor.numel() for tensor in tensors.values()):
        return {}
    return hash_samples({name: tensor[None] for name, tensor in tensors.items()}, dict.fromkeys(tensors, 0))


def refuse_misaligned(by_stage: Sequence[Sequence[Hashes]]) -> None:
    """Given what the replicas of each stage hold, in order."""
    names = sorted({name for stage in by_stage for hashes in stage for name in hashes})
    for name in names:
        batches = [[one for hashes in stage for one in hashes.get(name, ())] for stage in by_stage]
        for stage, batch in enumerate(batches):
            if batch != batches[0]:
                pairs = zip(batch, batches[0], strict=False)
                where = next((i for i, (one, other) in enumerate(pairs) if one != other), len(batch))
                raise ValueError(
                    f"sample {where} of the batch is not the same on stages 0 and {stage}: they were given "
                    f"different {name!r} for it (each rank gives its part of the "
                    "same batch in order, by its place among its own stage's replicas: "
                    "varuna.SampleOrder with replica=model.rank_within_stage, num_replicas=model.data_depth, "
                    "or a loader that is seeded alike on all stages; what is drawn at random for a sample "
                    "must be the same on all ranks)"
                )


def given_alike(replicas: Sequence[Hashes]) -> tuple[int, int] | None:
    """Two replicas whose samples are the same, if there are any."""
    seen: dict[object, int] = {}
    for replica, hashes in enumerate(replicas):
        batch = tuple(sorted((name, tuple(samples)) for name, samples in hashes.items() if samples))
        if batch and seen.setdefault(batch, replica) != replica:
            return seen[batch], replica
    return None
