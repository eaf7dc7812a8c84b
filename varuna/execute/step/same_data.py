"""Checks that all stages were given the same samples in the same order, and replicas different samples.

Every stage gets its inputs from its own data loader. Loaders with different shuffles would silently pair the
features of one sample with the label of another. If stages differ in their number of replicas, so would a
loader that splits samples in another order. So the first batch is checked. Replicas that all load the same
data train on a smaller batch than it seems.
"""

import hashlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from varuna.execute.comm.frames import memory_of, to_host

SampleHashes = Mapping[str, Sequence[bytes]]
"""One hash per sample, by name of the input."""


def hash_samples(inputs: Mapping[str, object], dims: Mapping[str, int]) -> dict[str, list[bytes]]:
    found = {}
    for name, dim in dims.items():
        value = inputs[name]
        if isinstance(value, Tensor):
            samples = to_host(value.detach().movedim(dim, 0))
            found[name] = [hashlib.blake2b(memory_of(s), digest_size=8).digest() for s in samples.unbind()]
    return found


def hash_batch(inputs: Mapping[str, object]) -> dict[str, list[bytes]]:
    """Hash the batch as one sample, if the batch dimensions are not known yet. Empty for an empty batch."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    if any(not tensor.numel() for tensor in tensors.values()):
        return {}
    return hash_samples({name: tensor[None] for name, tensor in tensors.items()}, dict.fromkeys(tensors, 0))


def check_same_samples(by_stage: Sequence[Sequence[SampleHashes]]) -> None:
    """Raise unless the replicas of each stage together hold the same samples in the same order."""
    for name in sorted({name for stage in by_stage for hashes in stage for name in hashes}):
        batches = [[one for hashes in stage for one in hashes.get(name, ())] for stage in by_stage]
        for stage, batch in enumerate(batches):
            if batch != batches[0]:
                pairs = zip(batch, batches[0], strict=False)
                where = next((i for i, (one, other) in enumerate(pairs) if one != other), len(batch))
                raise ValueError(
                    f"sample {where} of the batch differs between stages 0 and {stage}: they were given "
                    f"different {name!r} for it (give each rank its share of the same batch in order, by its "
                    "place among its own stage's replicas: "
                    "varuna.SampleOrder with replica=model.rank_within_stage, num_replicas=model.data_depth, "
                    "or a loader with the same seed on all stages; random augmentation of a sample must be "
                    "the same on all ranks)"
                )


def find_equal_replicas(replicas: Sequence[SampleHashes]) -> tuple[int, int] | None:
    """Return two replicas that were given the same samples, if there are any."""
    seen: dict[object, int] = {}
    for replica, hashes in enumerate(replicas):
        batch = tuple(sorted((name, tuple(samples)) for name, samples in hashes.items() if samples))
        if batch and seen.setdefault(batch, replica) != replica:
            return seen[batch], replica
    return None
