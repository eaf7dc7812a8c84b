"""Give the launch flags to a script's argparse parser, if the parser takes `--stage_to_rank_map`.

Only the parser knows the flags of a script: their names may be built in a loop, or be in another file.
"""

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MAP_FLAG = "--stage_to_rank_map"
"""The flag that shows that a parser is meant for Varuna: others may have a meaning of their own."""


def offer_flags(flags: Mapping[str, str]) -> None:
    """Make every parser of this process see the flags that it takes, before the arguments that it parses."""
    parse: Any = argparse.ArgumentParser.parse_known_args

    @functools.wraps(parse)
    def parse_with_flags(
        parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return parse(parser, [*lacking_flags(parser, given, flags), *given], namespace)

    argparse.ArgumentParser.parse_known_args = parse_with_flags  # type: ignore[assignment]


def lacking_flags(
    parser: argparse.ArgumentParser, given: Sequence[str], flags: Mapping[str, str]
) -> list[str]:
    """Return the flags that the parser takes and that are not given, as arguments."""
    taken = parser._option_string_actions
    if MAP_FLAG not in taken:
        return []
    names = {argument.partition("=")[0] for argument in given}
    return [f"{flag}={value}" for flag, value in flags.items() if flag in taken and flag not in names]
