"""A loss that is NaN or infinite: find the first stage with such a value, then warn, stop or skip."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from varuna.errors import ScriptError
from varuna.execute.comm.session import Session
from varuna.types import OnNan

log = logging.getLogger("varuna")

FINITE = -1.0
"""Number of the first micro-batch with a value that is not finite, if there is none."""


class NonFiniteLoss(ScriptError, FloatingPointError):
    """The loss is NaN or infinite, and `on_nan="stop"`."""


@dataclass
class NonFiniteSearch:
    """Watches the outputs of this stage in a repeated forward."""

    microbatch: float = FINITE
    _number: int = 0

    def check(self, outputs: Iterable[Tensor]) -> None:
        if self.microbatch == FINITE and not all_finite(outputs):
            self.microbatch = float(self._number)
        self._number += 1


@dataclass
class NonFiniteLosses:
    """Handles the non-finite losses of a job; all ranks call it with the same loss."""

    session: Session
    mode: OnNan = "warn"
    _num_in_a_row: int = field(default=0, init=False)

    @property
    def skips(self) -> bool:
        return self.mode == "skip"

    def handle(
        self,
        loss: float,
        step: int,
        parameters: Sequence[Tensor],
        repeat_forward: Callable[[NonFiniteSearch], None],
    ) -> None:
        """Log or raise, if the loss is not finite. The first one of several in a row is traced to its stage.

        `repeat_forward` runs the forwards of the step again and gives each one's outputs to the search.
        """
        if math.isfinite(loss):
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        is_first = self._num_in_a_row == 1
        if not (is_first or self.mode == "stop" or self._num_in_a_row & (self._num_in_a_row - 1) == 0):
            return  # warn of 1, 2, 4, 8, ... in a row
        message = f"the loss of step {step} is {loss}"
        if is_first:
            search = NonFiniteSearch()
            repeat_forward(search)
            message += f": {self._explain(search, parameters)}"
        else:
            message += f", as that of the {self._num_in_a_row - 1} steps before"
        if self.mode == "stop":
            raise NonFiniteLoss(f"{message} (on_nan='stop'; on_nan='skip' leaves such a step out)")
        if self.session.rank == self.session.ranks[0]:
            log.warning("%s%s", message, "; the step is skipped" if self.skips else "")

    def _explain(self, search: NonFiniteSearch, parameters: Sequence[Tensor]) -> str:
        own = float(not all_finite(parameters)), search.microbatch
        for stage, replicas in enumerate(self.session.gather_by_stage(own)):
            if any(is_broken for is_broken, _ in replicas):
                return f"parameters of stage {stage} are not finite"
            found = [(number, replica) for replica, (_, number) in enumerate(replicas) if number != FINITE]
            if found:
                number, replica = min(found)
                return (
                    f"the outputs of stage {stage} are the first that are not finite, in micro-batch "
                    f"{number:g} of replica {replica}; its parameters are finite"
                )
        return "the outputs of all stages are finite in a second run of the forward"


def all_finite(tensors: Iterable[Tensor]) -> bool:
    floats = [t for t in tensors if t.is_floating_point() or t.is_complex()]
    return not floats or bool(torch.stack([t.detach().isfinite().all() for t in floats]).all())
