"""Writes timelines in the Chrome trace format, which ui.perfetto.dev can open."""

import json
from collections.abc import Mapping

from varuna.observe.record import COMPUTE, look
from varuna.types import Timeline


def to_perfetto(timeline: Timeline | Mapping[str, Timeline]) -> str:
    """Return trace JSON: a process for each rank, with a track for compute and one for each other kind.

    A track can only show intervals that nest, but compute and a reduction may overlap. Several named
    timelines become groups of processes in one trace.
    """
    panels = {"": timeline} if isinstance(timeline, Timeline) else timeline
    names: list[dict[str, object]] = []
    events: list[dict[str, object]] = []
    pids: dict[tuple[str, int, int], int] = {}
    tracks: dict[tuple[int, str], int] = {}
    for name, panel in panels.items():
        for stage, rank in sorted({(interval.stage, interval.rank) for interval in panel.intervals}):
            pid = pids[name, stage, rank] = len(pids)
            label = f"{name} stage {stage}, rank {rank}".strip()
            names.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": label}})
            names.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        for interval in panel.intervals:
            pid = pids[name, interval.stage, interval.rank]
            track = "compute" if interval.what in COMPUTE else interval.what
            tid = tracks.setdefault((pid, track), len(tracks))
            number = "" if interval.microbatch < 0 else str(interval.microbatch)
            events.append(
                {
                    "name": f"{interval.what}{number}",
                    "cat": interval.what,
                    "ph": "X",
                    "ts": interval.start_seconds * 1e6,
                    "dur": (interval.stop_seconds - interval.start_seconds) * 1e6,
                    "pid": pid,
                    "tid": tid,
                    "cname": look(interval.what)[2],  # so that all ranks look the same
                    "args": {
                        "microbatch": interval.microbatch,
                        "rank": interval.rank,
                        "stage": interval.stage,
                    },
                }
            )
    for (pid, track), tid in tracks.items():
        names.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": track}})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": names + events})
