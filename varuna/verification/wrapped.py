"""Trains the wrapped model on one rank of a layout, and compares its numbers with the plain process's."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyrannc.module import RaNNCModule
from varuna.capture.model.call_convention import find_loss
from varuna.capture.run.verify import distance, norm
from varuna.train.varuna import Varuna
from varuna.train.wrap import hand_over
from varuna.types import PrecisionName, spread_evenly
from varuna.verification.layouts import VerifyLayout
from varuna.verification.plain import LOSS_SCALE, SEED
from varuna.verification.reference import Difference, ReferenceRun, input_tensors
from varuna.verification.subject import Inputs, VerifySubject

Face = Literal["varuna", "pyrannc"]
FACES: tuple[Face, ...] = ("varuna", "pyrannc")


class WrappedRun:
    """Compares every step of this rank with the reference. `train` returns all differences."""

    def __init__(
        self,
        subject: VerifySubject,
        layout: VerifyLayout,
        recording: ReferenceRun,
        *,
        precision: PrecisionName,
        timeout_seconds: float,
    ) -> None:
        self._subject, self._layout, self._recording = subject, layout, recording
        self._options: dict[str, Any] = {
            "device": "cpu",
            "seed": SEED,
            "precision": precision,
            "timeout_seconds": timeout_seconds,
            "shard_optimizer": layout.shard,
            **subject.options,
        }
        self._precision = precision
        self._names = _aliases(subject.model)
        self._found: list[Difference] = []

    def train(self, face: Face) -> list[Difference]:
        if face == "varuna":
            self._train_varuna()
        else:
            self._train_pyrannc()
        return self._found

    def _train_varuna(self) -> None:
        subject, layout = self._subject, self._layout
        names: dict[Tensor, str] = {value: name for name, value in subject.model.named_parameters()}
        wrapped = Varuna(
            subject.model,
            layout.map_text,
            subject.sample,
            subject.batch_size,
            layout.microbatch_size(subject.batch_size),
            schedule=layout.schedule,
            recompute=layout.recompute,
            **self._options,
        )
        if isinstance(subject.optimizer, torch.optim.Optimizer):
            optimizer = subject.optimizer
            hand_over(optimizer, names, wrapped)
        else:
            optimizer = subject.make_optimizer(wrapped.parameters())
        scale = {"loss_scale": LOSS_SCALE} if self._precision == "fp16" else {}
        wrapped.set_optimizer(optimizer, **scale)
        for step, batch in enumerate(subject.batches):
            share = self._share(batch, wrapped.rank_within_stage, wrapped.data_depth)
            loss, overflow = wrapped.step(subject.rows(batch, *share))
            self._note_step(step, loss, dict(wrapped.named_parameters()), dict(wrapped.named_buffers()))
            if not overflow:
                optimizer.step()
            wrapped.zero_grad()
            self._note_update(step, dict(wrapped.named_parameters()), batch, share)
        wrapped.close()

    def _train_pyrannc(self) -> None:
        subject, layout = self._subject, self._layout
        model = subject.model
        optimizer = subject.make_optimizer([p for p in model.parameters() if p.requires_grad])
        options = {
            name: value for name, value in self._options.items() if name not in ("loss", "shared_weights")
        }
        share = -(-subject.batch_size // max(layout.widths))
        wrapped = RaNNCModule(
            model,
            optimizer,
            replica_num=layout.widths,
            pipeline_num=-(-share // layout.microbatch_size(subject.batch_size)),
            checkpointing=layout.recompute,
            measure=False,
            **options,
        )
        for step, batch in enumerate(subject.batches):
            span = self._share(batch, _rank(), layout.world)
            loss = find_loss(wrapped(**subject.rows(batch, *span)), subject.options.get("loss"))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            total = self._mean_loss(float(loss.detach()), span, subject.num_samples(batch))
            parameters, buffers = _held(wrapped.named_parameters()), _held(wrapped.named_buffers())
            self._note_step(step, total, parameters, buffers)
            optimizer.step()
            wrapped.zero_grad()
            self._note_update(step, _held(wrapped.named_parameters()), batch, span)
        wrapped.undeploy()

    def _share(self, batch: Inputs, part: int, parts: int) -> tuple[int, int]:
        counts = spread_evenly(self._subject.num_samples(batch), parts=parts)
        return sum(counts[:part]), sum(counts[: part + 1])

    def _mean_loss(self, loss: float, span: tuple[int, int], size: int) -> float:
        """Return the mean over the samples of all ranks, each of which has the loss of its own."""
        share = (span[1] - span[0]) / size
        total = torch.tensor([loss * share if share else 0.0], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total)

    def _note_step(
        self, step: int, loss: float, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        self._note(step, "loss", {"": torch.tensor(loss, dtype=torch.float64)})
        grads = {name: value.grad for name, value in parameters.items() if value.requires_grad}
        self._note(step, "gradient", grads)
        self._note(step, "buffer", buffers)

    def _note_update(
        self, step: int, parameters: Mapping[str, Tensor], batch: Inputs, span: tuple[int, int]
    ) -> None:
        self._note(step, "parameter", parameters)
        tensors = input_tensors(self._subject.rows(batch, *span))
        known = {name: self._recording.read(step, "input", name) for name in tensors}
        plain = self._subject.rows({**known}, *span) if tensors else {}
        for name, value in tensors.items():
            other = plain.get(name)
            if value is not None and other is not None:
                self._found.append(Difference(step, "input", name, distance(other, value), norm(other)))

    def _note(self, step: int, kind: str, values: Mapping[str, Tensor | None]) -> None:
        named = {self._names.get(name, name): value for name, value in values.items()}
        self._found += self._recording.differences(step, kind, named)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the name in the recording of each name of a parameter or buffer."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, value in named:
            found[name] = first.setdefault(id(value), name)
    return found


def _held(named: Any) -> dict[str, Tensor]:
    return {name: value for name, value in named if not value.is_meta}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
