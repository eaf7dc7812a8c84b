"""Layouts to verify: how they are written, and the set that is chosen if none is given.

2x1            two stages, one replica
1x3            three replicas of the whole model
2+1            two stages: two replicas of the first, one of the second
2x2:gpipe      with a schedule
2x1:recompute:chunk=3
1x2:shard      optimizer state divided over the replicas
"""

import re
from typing import get_args

import msgspec

from varuna.types import ScheduleName, format_stage_map

SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
MOST_PROCESSES = 4
"""Processes of the largest layout that is chosen by default."""


class VerifyLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of each stage, and how they train. `chunk` None: chosen by the batch."""

    widths: tuple[int, ...]
    schedule: ScheduleName = "varuna"
    recompute: bool = False
    shard: bool = False
    chunk: int | None = None  # samples of a micro-batch

    @property
    def world(self) -> int:
        return sum(self.widths)

    @property
    def is_uneven(self) -> bool:
        return len(set(self.widths)) > 1

    @property
    def stage_map(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage; the stages of one replica have consecutive ranks."""
        depth = len(self.widths)
        if not self.is_uneven:
            return tuple(tuple(range(stage, self.world, depth)) for stage in range(depth))
        ranks = iter(range(self.world))
        return tuple(tuple(next(ranks) for _ in range(width)) for width in self.widths)

    @property
    def map_text(self) -> str:
        return format_stage_map(self.stage_map)

    def microbatch_size(self, batch_size: int) -> int:
        """Return the samples of a micro-batch: several per stage, and of unequal sizes where possible."""
        share = -(-batch_size // max(self.widths))
        wanted = self.chunk or max(1, share // max(2, len(self.widths)))
        return min(wanted, share)

    def __str__(self) -> str:
        shape = "+".join(map(str, self.widths)) if self.is_uneven else f"{len(self.widths)}x{self.widths[0]}"
        options: list[str] = [self.schedule] if self.schedule != "varuna" else []
        options += [name for name in ("recompute", "shard") if getattr(self, name)]
        options += [f"chunk={self.chunk}"] if self.chunk is not None else []
        return ":".join([shape, *options])


def parse_layouts(text: str) -> tuple[VerifyLayout, ...]:
    """Read layouts such as "2x1,1x2:shard,2+1:gpipe"."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError("no layout is given (write for example 2x1,1x2: stages x replicas)")
    return tuple(parse_layout(word) for word in words)


def parse_layout(text: str) -> VerifyLayout:
    shape, *options = text.lower().split(":")
    if match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape):
        widths = (int(match[2]),) * int(match[1])
    elif re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)+", shape):
        widths = tuple(map(int, shape.split("+")))
    else:
        raise ValueError(
            f"{text!r} is not a layout (write STAGESxREPLICAS, such as 2x1, or the replicas of each stage, "
            "such as 2+1; options follow after ':')"
        )
    layout = VerifyLayout(widths=widths)
    for option in options:
        layout = msgspec.structs.replace(layout, **_option(text, option))
    return layout


def _option(text: str, option: str) -> dict[str, object]:
    if option in SCHEDULES:
        return {"schedule": option}
    if option in ("recompute", "shard"):
        return {option: True}
    if match := re.fullmatch(r"chunk=([1-9]\d*)", option):
        return {"chunk": int(match[1])}
    raise ValueError(
        f"{text!r} has the option {option!r}, which is none of {', '.join(SCHEDULES)}, recompute, shard and "
        "chunk=N"
    )


def chosen_layouts(
    *, num_segments: int, batch_size: int, by_microbatch: bool, face: str
) -> tuple[VerifyLayout, ...]:
    """Choose layouts: one stage, deepest, widest, odd, unequal, recompute, sharded, and each schedule.

    `by_microbatch`: samples of a micro-batch influence each other (BatchNorm), so one process cannot compute
    the same as unequal numbers of replicas.
    """
    deep, wide = min(num_segments, MOST_PROCESSES), min(batch_size, MOST_PROCESSES)
    texts = ["1x1", f"1x1:chunk={batch_size}"]
    if deep > 1:
        texts += ["2x1", f"{deep}x1", "2x1:recompute"]
    if wide > 1:
        texts += [f"1x{wide}", "1x2:shard"]
    if wide > 2:
        texts += [f"1x3:chunk={max(1, batch_size // 3 - 1)}"]
    if deep > 1 and wide > 1:
        texts += ["2x2:recompute:shard"]
    if deep > 1 and wide > 1 and not by_microbatch:
        texts += ["2+1", "1+2:chunk=1"]
    if deep > 1 and face == "varuna":
        texts += [f"2x1:{schedule}:chunk=1" for schedule in SCHEDULES if schedule != "varuna"]
    return tuple(dict.fromkeys(map(parse_layout, texts)))
