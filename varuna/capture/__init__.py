"""From a model to the pieces that a pipeline runs: capture once, carve any span of segments."""

from varuna.capture.model.source import Source
from varuna.capture.model.state import StageState, stage_state
from varuna.capture.run.captured import Captured
from varuna.capture.run.program import Program
from varuna.capture.run.verify import check_capture
from varuna.capture.trace.cutpoint import CutPoint, cut_after
from varuna.capture.trace.opaque import opaque
from varuna.capture.trace.plain import plain_randomness

__all__ = [
    "Captured",
    "CutPoint",
    "Program",
    "Source",
    "StageState",
    "check_capture",
    "cut_after",
    "opaque",
    "plain_randomness",
    "stage_state",
]
