"""Position of one stage within its row. Has no clock, no links and no tensors.

The engine calls `next` with the number of messages that have arrived; the decision is `rule.choose`.
"""

from collections.abc import Sequence

from varuna.schedule.rule import BACKWARD, FORWARD, WAIT, choose
from varuna.types import Instruction


class Cursor:
    """Gives out the instructions of one stage, each once."""

    def __init__(
        self, row: Sequence[Instruction], *, stage: int, stages: int, limit: int, opportunistic: bool
    ) -> None:
        self._row = row
        self._end = end = len(row)
        self._is_first = stage == 0
        self._is_last = stage == stages - 1
        self._limit = limit
        self._opportunistic = opportunistic

        # Positions in the row. Each list ends with the row's length: no instruction is left.
        self._forwards: list[int] = []
        self._backwards: list[int] = []
        self._weights: list[int] = []
        backwards = self._backwards
        lists = {"F": self._forwards, "R": backwards, "B": backwards, "I": backwards, "W": self._weights}
        for position, instruction in enumerate(row):
            lists[instruction.op].append(position)
        for positions in (self._forwards, backwards, self._weights):
            positions.append(end)

        # Instructions taken so far, and the position of the next one.
        self._num_forwards = 0
        self._num_backward_steps = 0  # recomputes included
        self._num_backwards = 0
        self._num_weights = 0
        self._deferred = 0  # weight parts whose input part is done
        self._forward = self._forwards[0]
        self._backward = self._backwards[0]
        self._weight = self._weights[0]
        self._is_recompute = self._backward < end and row[self._backward].op == "R"
        self.finished = not row

    @property
    def held(self) -> int:
        """Micro-batches between their forward and their backward."""
        return self._num_forwards - self._num_backwards

    def next(self, activations: int, gradients: int) -> Instruction | None:
        """Take the instruction to run now; None means that the stage must wait.

        `activations` and `gradients` count the arrivals of this step. The first stage needs no
        activations, the last stage no gradients.
        """
        num_forwards, num_backwards = self._num_forwards, self._num_backwards
        choice = choose(
            self._forward,
            self._backward,
            self._weight,
            self._end,
            activations > num_forwards or self._is_first,
            gradients > num_backwards or self._is_last,
            self._is_recompute,
            self._opportunistic,
            num_forwards - num_backwards,
            self._limit,
            self._deferred,
        )
        if choice == BACKWARD:
            row = self._row
            instruction = row[self._backward]
            op = instruction.op
            if op != "R":
                self._num_backwards = num_backwards + 1
                if op == "I":
                    self._deferred += 1
            self._num_backward_steps = step = self._num_backward_steps + 1
            self._backward = backward = self._backwards[step]
            if backward < self._end:
                self._is_recompute = row[backward].op == "R"
            else:
                self._is_recompute = False
                self.finished = self._weight == backward
            return instruction
        if choice == FORWARD:
            instruction = self._row[self._forward]
            self._num_forwards = num_forwards = num_forwards + 1
            self._forward = self._forwards[num_forwards]
            return instruction
        if choice == WAIT:
            return None
        instruction = self._row[self._weight]
        self._num_weights += 1
        self._weight = self._weights[self._num_weights]
        self._deferred -= 1
        if self._weight == self._end:
            self.finished = self._backward == self._end
        return instruction

    def waiting_for(self) -> tuple[str, int]:
        """Return the arrival that unblocks the head of the order, for example ("gradient", 3)."""
        head = min(self._forward, self._backward, self._weight)
        assert head < self._end, "a finished stage waits for nothing"
        instruction = self._row[head]
        return ("activation" if instruction.op == "F" else "gradient"), instruction.microbatch
