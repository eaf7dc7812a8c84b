"""Answers what a stage runs next, given what has arrived. Pure: no clocks, no links, no tensors.

The engine asks with real arrivals, the simulator with simulated ones; the rule is here alone.

A row is three FIFO sequences woven together: forwards, backwards (with their recomputes) and
weight parts. The cursor keeps one pointer into each; the head of the preference order is the
pointer that stands first in the row. That makes overtaking cheap: nothing is ever searched.

Why overtaking cannot deadlock: when the head is a forward, only backwards can have overtaken it,
so the stage holds no more than it would in the strict order, and the limit does not block it.
A head thus waits for an arrival only, and the arrivals of a deadlock-free order always come.
"""

from collections.abc import Sequence

from varuna.types import Instruction


class Cursor:
    """Where one stage stands within one step."""

    def __init__(
        self, row: Sequence[Instruction], *, stage: int, stages: int, limit: int, opportunistic: bool
    ) -> None:
        self._row = row
        self._needs_activations = stage > 0
        self._needs_gradients = stage < stages - 1
        self._limit = limit
        self._opportunistic = opportunistic

        # Positions in the row, each list closed by the row's length: "no more of these".
        self._forwards: list[int] = []
        self._backwards: list[int] = []
        self._weights: list[int] = []
        lists = {
            "F": self._forwards,
            "R": self._backwards,
            "B": self._backwards,
            "I": self._backwards,
            "W": self._weights,
        }
        for position, instruction in enumerate(row):
            lists[instruction.op].append(position)
        for positions in (self._forwards, self._backwards, self._weights):
            positions.append(len(row))

        self._num_forwards = 0  # taken so far; R counts among the backwards' steps only
        self._num_backward_steps = 0
        self._num_backwards = 0
        self._num_weights = 0

    @property
    def finished(self) -> bool:
        taken = self._num_forwards + self._num_backward_steps + self._num_weights
        return taken == len(self._row)

    @property
    def held(self) -> int:
        """The micro-batches between their forward and their backward."""
        return self._num_forwards - self._num_backwards

    def next(self, activations: int, gradients: int) -> Instruction | None:
        """Takes the instruction to run now, or gives None where the stage must wait.

        `activations` and `gradients` count what has arrived in this step; the first stage needs
        no activations, the last no gradients.
        """
        row = self._row
        forward = self._forwards[self._num_forwards]
        backward = self._backwards[self._num_backward_steps]
        weight = self._weights[self._num_weights]

        if forward < backward and forward < weight:
            if activations > self._num_forwards or not self._needs_activations:
                return self._take_forward(forward)
        elif backward < weight:
            instruction = row[backward]
            done = self._num_backwards
            if gradients > done or not self._needs_gradients:
                return self._take_backward(instruction)
            if instruction.op == "R" and not self._opportunistic:
                return self._take_backward(instruction)
        elif weight < len(row):
            return self._take_weight(weight)
        if not self._opportunistic:
            return None

        done = self._num_backwards
        ready = self._num_forwards > done and backward < len(row)
        if ready and (gradients > done or not self._needs_gradients):
            return self._take_backward(row[backward])
        if (
            forward < len(row)
            and (activations > self._num_forwards or not self._needs_activations)
            and self._num_forwards - done < self._limit
        ):
            return self._take_forward(forward)
        if weight < len(row) and row[weight].microbatch < done:
            return self._take_weight(weight)
        # Nothing else to do: a recompute ahead of its gradient costs no time that is of use.
        if ready and row[backward].op == "R":
            return self._take_backward(row[backward])
        return None

    def waiting_for(self) -> tuple[str, int]:
        """The arrival that unblocks the head of the preference order: ("gradient", 3)."""
        head = min(
            self._forwards[self._num_forwards],
            self._backwards[self._num_backward_steps],
            self._weights[self._num_weights],
        )
        assert head < len(self._row), "a finished stage waits for nothing"
        instruction = self._row[head]
        return ("activation" if instruction.op == "F" else "gradient"), instruction.microbatch

    def _take_forward(self, position: int) -> Instruction:
        self._num_forwards += 1
        return self._row[position]

    def _take_backward(self, instruction: Instruction) -> Instruction:
        self._num_backward_steps += 1
        if instruction.op != "R":
            self._num_backwards += 1
        return instruction

    def _take_weight(self, position: int) -> Instruction:
        self._num_weights += 1
        return self._row[position]
