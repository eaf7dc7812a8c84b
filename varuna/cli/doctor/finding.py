"""The result of a check."""

from typing import Literal

import msgspec

Result = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """The result of one check, and what to do about it."""

    what: str
    result: Result
    found: str
    remedy: str = ""
