"""The file `timeline.json` of a job's log folder: a typical step, measured and predicted."""

import msgspec

from varuna.types import StepReport, Timeline

NAME = "timeline.json"


class StepTimelines(msgspec.Struct, frozen=True):
    report: StepReport
    measured: Timeline  # of the first replica
    predicted: Timeline | None = None
