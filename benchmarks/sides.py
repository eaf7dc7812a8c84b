"""The sides of a comparison: our training step, and the same step with PyTorch alone.

A side is made on every rank of a job, in the same processes as its rival. One `step` is what a training
loop does: all micro-batches forward and backward, the loss, the optimizer, and gradients set to none.
It returns the loss of the whole batch where the rank knows it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jitter import HeldBack, Jitter
from benchmarks.models import SEED, Size, loss_of, make_batch, make_model, make_piece, spans
from varuna import Varuna
from varuna.types import format_stage_map

LEARNING_RATE = 1e-3


class Side:
    def step(self) -> float | None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


class Ours(Side):
    """`Varuna` as users get it, with the default schedule unless another is given."""

    def __init__(
        self,
        size: Size,
        *,
        depth: int,
        width: int = 1,
        microbatches: int,
        jitter: Jitter | None = None,
        **options: Any,
    ) -> None:
        ranks = [[stage + depth * replica for replica in range(width)] for stage in range(depth)]
        rank = dist.get_rank()
        share = microbatches * size.microbatch
        tokens, labels = make_batch(size, share * width)
        sample_tokens, sample_labels = make_batch(size, 2)
        self.model = Varuna(
            make_model(size),
            format_stage_map(ranks),
            {"tokens": sample_tokens, "labels": sample_labels},
            batch_size=share * width,
            chunk_size=size.microbatch,
            device="cpu",
            seed=SEED,
            from_cache=False,
            spans=spans(size, depth) if depth > 1 else None,
            link_delay=None if jitter is None else jitter.of_rank(rank),
            **options,
        )
        first = self.model.rank_within_stage * share
        self.inputs = {"tokens": tokens[first : first + share], "labels": labels[first : first + share]}
        self.optimizer = make_optimizer(self.model.parameters())
        self.model.set_optimizer(self.optimizer)

    def step(self) -> float:
        loss, _ = self.model.step(self.inputs)
        self.optimizer.step()
        self.model.zero_grad()
        return loss

    def close(self) -> None:
        self.model.close()


class BareLoop(Side):
    """One process, the unwrapped model, gradients accumulated over the same micro-batches."""

    def __init__(self, size: Size, *, microbatches: int) -> None:
        self.model = make_model(size)
        self.optimizer = make_optimizer(self.model.parameters())
        self.size, self.microbatches = size, microbatches
        self.tokens, self.labels = make_batch(size, microbatches * size.microbatch)

    def step(self) -> float:
        total = torch.zeros(())
        for tokens, labels in self._split():
            loss = self.model(tokens, labels) / self.microbatches
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)

    def _split(self) -> list[tuple[Tensor, Tensor]]:
        parts = torch.split(self.tokens, self.size.microbatch), torch.split(self.labels, self.size.microbatch)
        return list(zip(*parts, strict=True))


class DataParallel(Side):
    """DistributedDataParallel, reducing once: in the backward of the last micro-batch."""

    def __init__(self, size: Size, *, microbatches: int) -> None:
        self.model = DistributedDataParallel(make_model(size), gradient_as_bucket_view=True)
        self.optimizer = make_optimizer(self.model.parameters())
        self.microbatches = microbatches
        share = microbatches * size.microbatch
        tokens, labels = make_batch(size, share * dist.get_world_size())
        own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        self.parts = list(
            zip(
                torch.split(tokens[own], size.microbatch),
                torch.split(labels[own], size.microbatch),
                strict=True,
            )
        )

    def step(self) -> float:
        total = torch.zeros(())
        with self.model.no_sync():
            for tokens, labels in self.parts[:-1]:
                total += self._run(tokens, labels)
        total += self._run(*self.parts[-1])
        dist.all_reduce(total)  # a loop that prints its loss: ours gives the whole batch's too
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total) / dist.get_world_size()

    def _run(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = self.model(tokens, labels) / self.microbatches
        loss.backward()
        detached: Tensor = loss.detach()
        return detached


class TorchPipeline(Side):
    """torch.distributed.pipelining's 1F1B over gloo, on the same pieces of the same model."""

    def __init__(self, size: Size, *, depth: int, microbatches: int, jitter: Jitter | None = None) -> None:
        rank = dist.get_rank()
        piece: nn.Module = make_piece(size, *spans(size, depth)[rank])
        self.group = dist.new_group(list(range(depth)), backend="gloo")
        stage = PipelineStage(piece, rank, depth, torch.device("cpu"), group=self.group)
        self.schedule = Schedule1F1B(stage, n_microbatches=microbatches, loss_fn=loss_of)
        self.optimizer = make_optimizer(piece.parameters())
        tokens, labels = make_batch(size, microbatches * size.microbatch)
        self.run: Callable[[], float | None]
        if rank == depth - 1:
            self.run = lambda: self._last(labels)
        elif rank == 0:
            self.run = lambda: self.schedule.step(tokens, return_outputs=False)
        else:
            self.run = lambda: self.schedule.step(return_outputs=False)
        self.held_back = None if jitter is None else HeldBack(jitter.of_rank(rank))

    def step(self) -> float | None:
        if self.held_back is None:
            loss = self.run()
        else:
            with self.held_back:
                loss = self.run()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _last(self, labels: Tensor) -> float:
        losses: list[Tensor] = []
        self.schedule.step(target=labels, losses=losses, return_outputs=False)
        return float(torch.stack([loss.detach() for loss in losses]).mean())

    def close(self) -> None:
        if self.held_back is not None:
            self.held_back.close()
        dist.destroy_process_group(self.group)


SIDES: dict[str, type[Side]] = {
    "varuna": Ours,
    "bare loop": BareLoop,
    "DistributedDataParallel": DataParallel,
    "torch 1F1B": TorchPipeline,
}
