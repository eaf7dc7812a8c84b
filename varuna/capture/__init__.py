"""Captures a model once, and carves the program of any span of segments out of it."""

from varuna.capture.model.source import Source
from varuna.capture.model.state import StageState, stage_state
from varuna.capture.run.captured import Captured
from varuna.capture.run.loss_parts import explain_parts
from varuna.capture.run.plain_randomness import plain_randomness
from varuna.capture.run.program import SpanProgram
from varuna.capture.run.verify import check_capture
from varuna.capture.trace.cutpoint import CutPoint, cut_after
from varuna.capture.trace.opaque_module import opaque

__all__ = [
    "Captured",
    "CutPoint",
    "Source",
    "SpanProgram",
    "StageState",
    "check_capture",
    "cut_after",
    "explain_parts",
    "opaque",
    "plain_randomness",
    "stage_state",
]
