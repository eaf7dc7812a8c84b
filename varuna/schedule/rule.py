"""The scheduling rule: which instruction a stage runs next, given what has arrived.

The engine's `Cursor` and the simulator's kernel both call `choose`. It takes and returns plain
numbers only, so that numba can compile it.

A row interleaves three FIFO sequences: forwards, backwards (with their recomputes) and weight parts.
A stage keeps one pointer into each; the pointer that stands first in the row is its head.

Overtaking cannot deadlock. When the head is a forward, only backwards can have overtaken it, so the
stage holds at most what it holds in the strict order, and the limit does not block the head. A head
therefore waits for an arrival only, and in an order without deadlock every arrival comes.
"""

FORWARD, BACKWARD, WEIGHT, WAIT = range(4)
"""The sequence to continue. BACKWARD includes recomputes."""


def choose(
    forward: int,
    backward: int,
    weight: int,
    end: int,
    has_activation: bool,
    has_gradient: bool,
    is_recompute: bool,
    opportunistic: bool,
    held: int,
    limit: int,
    deferred: int,
) -> int:
    """Return the sequence that the stage continues, or WAIT.

    `forward`, `backward` and `weight` are positions in the row of the next instruction of each
    sequence; `end` stands for none left. `has_activation` and `has_gradient` say whether the next
    forward and the next backward have their message; `is_recompute` says whether the next backward
    is a recompute. `held` micro-batches are between forward and backward, at most `limit`;
    `deferred` weight parts have their input part done.
    """
    if forward < backward and forward < weight:
        if has_activation:
            return FORWARD
    elif backward < weight:
        if has_gradient or (is_recompute and not opportunistic):
            return BACKWARD
    elif weight < end:
        return WEIGHT
    if not opportunistic:
        return WAIT
    if has_gradient and held > 0 and backward < end:
        return BACKWARD
    if has_activation and held < limit and forward < end:
        return FORWARD
    if deferred > 0 and weight < end:
        return WEIGHT
    # Nothing else is ready, so a recompute before its gradient arrives costs no time.
    if is_recompute and held > 0:
        return BACKWARD
    return WAIT
