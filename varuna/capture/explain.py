"""Turns what torch.export says about a model that it cannot trace into an error that names the model's own line."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from varuna.capture.recorder import Recorder
from varuna.errors import CaptureError

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def blame(error: BaseException) -> str:
    """The last line of the model's own code on the way to an error, as "file:line: source", or ""."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith((_OURS, _TORCH, "<")):
            continue
        source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        return f"{frame.filename}:{frame.lineno}: {source}"
    return ""


@contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{blame(error)}: {error}") from error


@contextmanager
def watched(recorder: Recorder) -> Iterator[None]:
    yield
