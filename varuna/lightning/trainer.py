"""The strategy of Lightning's Trainer: it partitions the modules that `training_step` calls."""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from pyrannc.process import delay_grad_allreduce
from varuna.lightning.losses import compare_parts, loss_factor, refuse_counted_labels
from varuna.lightning.parts import ModelParts, start_equal
from varuna.lightning.preemption import add_preemption
from varuna.lightning.ranks import Messages, environment_class, started_process
from varuna.lightning.sampling import DealtSampler, can_be_dealt

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as TrainerBase
else:
    TrainerBase = object

log = logging.getLogger("varuna")

LossWeight = Callable[[Any], Any]
"""Returns how much the samples of a batch count in the loss."""


class TrainerBehaviour(TrainerBase):
    """Pipeline and data parallel training with the Trainer; the base class is Lightning's DDPStrategy."""

    strategy_name = "varuna"
    environment_base: Any
    callback_base: Any
    update_dataloader: Any  # Lightning's function that makes a DataLoader with another sampler

    def __init__(
        self,
        modules: str | Sequence[str] | None = None,
        loss_weight: LossWeight | None = None,
        check_loss: bool = True,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        start_method: Any = "popen",
        **options: Any,
    ) -> None:
        process = started_process()
        if cluster_environment is None and process is not None:
            cluster_environment = environment_class(self.environment_base)(process)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
        )
        self._modules = [modules] if isinstance(modules, str) else modules
        self._loss_weight = loss_weight
        self._check_loss = check_loss
        self._options = options
        self._messages = Messages()
        self._parts: ModelParts | None = None
        self._failed = False
        self._connector: Any = None  # of the Trainer, while this strategy deals the samples
        self._weight = 0.0  # of this rank's batch

    # ------------------------------------------------------------ set up and tear down

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True is not supported by the varuna strategy (leave it out: BatchNorm sees "
                "micro-batches, and its statistics are those of all micro-batches of all ranks)"
            )
        self._failed = False
        connector, self._connector = trainer._accelerator_connector, None
        if connector.use_distributed_sampler and trainer.state.fn != "predict":
            connector.use_distributed_sampler, self._connector = False, connector
        if trainer.state.fn == "fit":
            add_preemption(trainer, self.callback_base)
        super().setup(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Deal the samples of each batch to all ranks, in the order of the DataLoader."""
        if self._connector is None or self.world_size == 1 or not can_be_dealt(dataloader):
            return dataloader
        assert isinstance(dataloader, DataLoader) and dataloader.batch_size is not None
        sampler = DealtSampler(
            dataloader.sampler,
            batch_size=dataloader.batch_size,
            drop_last=dataloader.drop_last,
            rank=self.global_rank,
            world=self.world_size,
            device=self.root_device,
        )
        return self.update_dataloader(dataloader, sampler)

    def setup_distributed(self) -> None:
        """Join the other ranks. Random states stay as the script left them, as in one process."""
        before = torch.get_rng_state(), random.getstate()
        super().setup_distributed()
        torch.set_rng_state(before[0])
        random.setstate(before[1])

    def configure_ddp(self) -> None:
        """Start all ranks with the same values; there is no DistributedDataParallel."""
        assert self.model is not None
        start_equal(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS) and self.world_size > 1:
                raise ValueError(
                    "LBFGS needs all gradients of the model at once, but each rank holds one stage (use "
                    "another optimizer, such as AdamW)"
                )
        self._parts = ModelParts(
            self.lightning_module, self.optimizers, self.root_device, self._options, self._modules
        )

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Give the LightningModule and its optimizers back whole, on every rank."""
        if self._connector is not None:
            self._connector.use_distributed_sampler, self._connector = True, None
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.release(gather=not self._failed)
            if self._failed and any(p.is_meta for p in parts.root.parameters()):
                self._lightning_module = None  # a part of it is on other ranks: it cannot be moved
                self._optimizers = []
        super().teardown()

    # ------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._loss_weight is not None and self._parts is not None:
            batch = args[0] if args else next(iter(kwargs.values()))
            self._weight = float(self._loss_weight(batch))
        if self._check_loss and self._parts is not None and not self._parts.parts:
            self._compare_with_parts(*(args or tuple(kwargs.values())))
        return super().training_step(*args, **kwargs)

    def _compare_with_parts(self, batch: Any, *others: Any) -> None:
        """Refuse a loss that is no mean over samples; all ranks call it before the first step."""
        module: Any = self.lightning_module
        if self.world_size == 1 or not module.automatic_optimization:
            return
        assert self._parts is not None
        with self._parts.plain_forwards():
            check = compare_parts(module, batch, others, self._loss_weight)
        if check.skipped is not None and self.global_rank == 0:
            log.warning(
                "the loss of training_step was not compared with those of parts of the batch: %s. If it is "
                "no mean over samples, training differs from one process (say how much the samples of a "
                "batch count: VarunaStrategy(loss_weight=...); "
                "VarunaStrategy(check_loss=False) leaves this out)",
                check.skipped,
            )
        found = check.difference
        number = torch.tensor(float(found is not None), device=self.root_device)
        dist.all_reduce(number)
        if number:
            raise ValueError(
                f"the loss of training_step is no mean over samples: {found or 'so another rank found'}. So "
                "the mean over ranks is not the loss of the whole batch (say how much the samples of a batch "
                "count: VarunaStrategy(loss_weight=lambda batch: batch['mask'].sum()); or compute the loss "
                "in the forward of the partitioned module; or, if a mean over ranks is what you want, "
                "VarunaStrategy(check_loss=False))"
            )

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        parts = self._parts
        if parts is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._loss_weight is not None:
            closure_loss = closure_loss * self._weigh(parts)
        elif self.world_size > 1:
            refuse_counted_labels(closure_loss)
        with parts.backward(closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _weigh(self, parts: ModelParts) -> float:
        """Return the factor by which this rank's loss becomes its part of the loss of the whole batch."""
        total = torch.tensor(self._weight, dtype=torch.float64, device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return loss_factor(self._weight, float(total), parts.share)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add up gradients without reducing them."""
        delay_grad_allreduce(True)
        try:
            yield
        finally:
            delay_grad_allreduce(False)

    # ------------------------------------------------------------ calls that all ranks make

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._announced("strategy.barrier"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self._announced("strategy.broadcast"):
            return self._messages.broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        with self._announced("strategy.reduce"):
            return super().reduce(tensor, group, reduce_op)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Refuse data that ends on one rank before it ends on another."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            with self._announced("next_epoch"):
                pass

    def _announced(self, call: str) -> AbstractContextManager[None]:
        return nullcontext() if self._parts is None else self._parts.announce(call)
