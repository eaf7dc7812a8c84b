"""The strategy of Lightning Fabric: modules that `fabric.setup` is given are partitioned over all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pyrannc.process import delay_grad_allreduce
from varuna.lightning.losses import explain_divisors, loss_divisors
from varuna.lightning.parts import ModelParts, start_equal
from varuna.lightning.ranks import Messages, environment_class, started_process

FIRST_CHECKS = 10
"""Backwards whose losses are compared between ranks, at the start."""
CHECK_EVERY = 101
"""Afterwards one of so many is compared; a prime number, so that each of several losses has its turn."""

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricBase
else:
    FabricBase = object


class FabricBehaviour(FabricBase):
    """Pipeline and data parallel training with Fabric; the base class is Fabric's DDPStrategy."""

    environment_base: Any

    def __init__(
        self,
        modules: str | Sequence[str] | None = None,
        check_loss: bool = True,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
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
            precision=precision,
            process_group_backend=process_group_backend,
            start_method=start_method,
        )
        self._modules = [modules] if isinstance(modules, str) else modules
        self._check_loss = check_loss
        self._options = options
        self._messages = Messages()
        self._parts: list[ModelParts] = []
        self._num_backwards = 0
        self._backward_sync_control = DelayedReduction()  # type: ignore[assignment]

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        return self._set_up(module, [])

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        return self._set_up(module, optimizers), optimizers, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for parts in self._parts:
            parts.add_optimizer(optimizer)
        return optimizer

    def _set_up(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
        start_equal(module)
        self._parts.append(ModelParts(module, optimizers, self.root_device, self._options, self._modules))
        return module

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self.world_size > 1 and self._check_loss:
            counts = next((parts.counts for parts in self._parts if parts.counts), None)
            if counts is not None and is_checked(self._num_backwards, counts):
                self._compare_divisors(tensor, counts)
            self._num_backwards += 1
        with ExitStack() as stack:
            for parts in self._parts:
                stack.enter_context(parts.backward(tensor))
            super().backward(tensor, module, *args, **kwargs)

    def _compare_divisors(self, loss: Tensor, counts: Sequence[int]) -> None:
        """Refuse a loss that is no mean over samples; all ranks call it before a backward."""
        with self._announced("strategy.reduce"):
            found = explain_divisors(self._messages.gather(loss_divisors(loss)), counts)
        if found is not None:
            raise ValueError(
                f"the loss is no mean over samples: {found}. So the mean over ranks is not the loss of the "
                "whole batch (divide by the number on all ranks: loss = losses.sum() * fabric.world_size / "
                'fabric.all_reduce(count, reduce_op="sum"); or compute the loss in the forward of the '
                "module; or, if a mean over ranks is what you want, VarunaFabricStrategy(check_loss=False))"
            )

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return module.state_dict()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._announced("strategy.barrier"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self._announced("strategy.broadcast"):
            return self._messages.broadcast(obj, src)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        with self._announced("strategy.reduce"):
            return super().all_reduce(tensor, group, reduce_op)

    def _announced(self, call: str) -> AbstractContextManager[None]:
        return self._parts[0].announce(call) if self._parts else nullcontext()


def is_checked(number: int, counts: Sequence[int]) -> bool:
    """Return whether the loss of a backward is compared between ranks: the same answer on all of them.

    `counts` are the samples of each rank, which all ranks know.
    """
    return number < FIRST_CHECKS or number % CHECK_EVERY == 0 or len(set(counts)) > 1


class DelayedReduction:
    """`fabric.no_backward_sync`: add up gradients without reducing them."""

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        delay_grad_allreduce(enabled)
        try:
            yield
        finally:
            delay_grad_allreduce(False)
