"""Log folders of jobs, as a manager leaves them: for what a real job cannot show within a test."""

import math
from itertools import pairwise
from pathlib import Path

import msgspec

from varuna.observe.history_file import NAME as METRICS
from varuna.observe.history_file import MetricLine
from varuna.observe.job_view import NAME as VIEW
from varuna.observe.job_view import EventView, JobView, LayoutView, MachineView
from varuna.observe.ledger import Ledger
from varuna.observe.record import Entry, merge, to_timeline
from varuna.observe.step_timelines import NAME as TIMELINES
from varuna.observe.step_timelines import StepTimelines
from varuna.observe.trace_file import StepTracer
from varuna.types import Forecast, MemoryForecast, StageForecast, StageTime, StepReport, Timeline

LONG_NAME = "<img src=x onerror=alert(2)>-" + "long-name-of-a-scalar" * 2  # as long as varuna.log allows
BEGUN = 1_790_000_000.0


def write_folder(folder: Path, *, machines: int, stages: int, steps: int) -> Path:
    """Write a finished job. Its loss falls, with one spike at step `steps // 3`."""
    folder.mkdir(parents=True, exist_ok=True)
    spike = steps // 3
    line = msgspec.json.Encoder().encode
    with (folder / METRICS).open("wb") as file:
        for step in range(1, steps + 1):
            loss = 100.0 if step == spike else 2.0 + 6.0 * math.exp(-6.0 * step / steps)
            file.write(line(MetricLine(step, BEGUN + step * 0.1, loss, 0.1, 512)) + b"\n")
    events = [
        {"at": "2026-09-21T14:14:00.000+00:00", "what": "generation", "why": "1: the first layout"},
        {"at": "2026-09-21T14:15:00.000+00:00", "what": "machine lost", "why": "node-3 does not answer"},
        {"at": "2026-09-21T14:16:00.000+00:00", "what": "finished", "why": "every worker ended normally"},
    ]
    (folder / "events.jsonl").write_bytes(b"".join(line(event) + b"\n" for event in events))
    ledger = Ledger(begun_at=BEGUN, at=BEGUN + steps * 0.1, num_machines=[(BEGUN, machines)])
    (folder / "ledger.json").write_bytes(line(ledger))
    (folder / VIEW).write_bytes(line(view_of(machines=machines, stages=stages, steps=steps)))
    return folder


def view_of(*, machines: int, stages: int, steps: int) -> JobView:
    width = machines // stages
    stage_map = tuple(tuple(range(stage, machines, stages))[:width] for stage in range(stages))
    layout = LayoutView(
        generation=1,
        stage_map=stage_map,
        depth=stages,
        widths=(width,) * stages,
        batch_size=512,
        microbatch_size=4,
        text=f"{stages} stages x {width} replicas",
    )
    rows = tuple(
        MachineView(
            name=f"node-{number}",
            state="at work",
            ranks=(number,),
            step=steps,
            step_seconds=0.1,
            compute_seconds=0.07 + 0.01 * math.sin(number),
            wait_seconds=0.03 - 0.01 * math.sin(number),
            memory_bytes=int(40e9),
            memory_limit=int(80e9),
            slow=number == 7,
            seen_seconds_ago=0.4,
        )
        for number in range(machines)
    )
    return JobView(
        job="train-1f2e3d4c",
        at=BEGUN + steps * 0.1,
        begun_at=BEGUN,
        phase="ending",
        phase_seconds=1.0,
        reason="every worker ended normally",
        step=steps,
        num_steps=steps,
        loss=2.0,
        step_seconds=0.1,
        samples_per_second=5120.0,
        layout=layout,
        machines=rows,
        events=(EventView(BEGUN + 5, "finished", "every worker ended normally"),),
        eta_seconds=25_140.0,
        store="/home/someone/checkpoints/runs/7",
        saved_step=steps,
        scalars={LONG_NAME: 0.132},
    )


def step_entries(*, stage: int, stages: int, microbatches: int, unit: float = 0.01) -> list[Entry]:
    """Return what a stage does in a step: all forwards, all backwards, and the reduction at the end."""
    forwards = [("F", number, (stage + number) * unit) for number in range(microbatches)]
    begin = 2 * stages - stage + microbatches - 2
    backwards = [("B", number, (begin + 2 * number) * unit) for number in range(microbatches)]
    work = [(kind, number, start, start + unit) for kind, number, start in (*forwards, *backwards)]
    waits = [("wait", -1, one[3], next[2]) for one, next in pairwise(work) if next[2] > one[3]]
    end = (2 * stages + 3 * microbatches) * unit
    return [*sorted((*work, *waits), key=lambda entry: entry[2]), ("reduce", -1, end - unit, end)]


class TracedWorker:
    """The trace file of one worker, written as the worker does it."""

    def __init__(self, folder: Path, *, generation: int, rank: int, file_bytes: int = 2**21) -> None:
        self.path = folder / f"generation_{generation}" / f"rank_{rank}.trace"
        self.generation, self.rank, self.stage, self.stages = generation, rank, rank, 2
        self._tracer = StepTracer(self.path, file_bytes=file_bytes, write_seconds=-math.inf)

    def finish(self, *steps: int, microbatches: int = 2) -> None:
        """Write these steps."""
        for step in steps:
            entries = step_entries(stage=self.stage, stages=self.stages, microbatches=microbatches)
            sent = ("send", 0, entries[0][2], entries[0][3])
            self._tracer.leave(
                step,
                self.rank,
                self.stage,
                self.stages,
                lambda entries=[*entries, sent]: list(entries),  # type: ignore[misc]
                generation=self.generation,
            )
            self._tracer.enter(entries[-1][3] + 0.01, uninterrupted=True)


def write_report(folder: Path, *, stages: int, microbatches: int, predicted: bool) -> None:
    """Write the report of a typical step, as the first worker does it at step 10."""

    def timeline(unit: float) -> Timeline:
        found = (
            step_entries(stage=stage, stages=stages, microbatches=microbatches, unit=unit)
            for stage in range(stages)
        )
        return merge(to_timeline(entries, stage, stage) for stage, entries in enumerate(found))

    memory = MemoryForecast(*[2**20] * 8)
    times = (0.04, 0.03, 0.01, 0.02)
    forecast = Forecast(0.1, (StageForecast(*times, memory),) * stages)
    report = StepReport(10, 7, 0.12, (StageTime(*times),) * stages, forecast if predicted else None)
    found = StepTimelines(report, timeline(0.01), timeline(0.009) if predicted else None)
    (folder / TIMELINES).write_bytes(msgspec.json.encode(found))
