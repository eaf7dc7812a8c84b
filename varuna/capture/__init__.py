"""From a model to the pieces that a pipeline runs: capture once, carve any span of segments."""

from varuna.capture.captured import Captured
from varuna.capture.check import check_capture
from varuna.capture.cutpoint import CutPoint, cut_after
from varuna.capture.opaque import opaque
from varuna.capture.plain import plain_randomness
from varuna.capture.program import Program
from varuna.capture.source import Source
from varuna.capture.state import StageState, stage_state

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
