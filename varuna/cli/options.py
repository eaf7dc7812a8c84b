"""Shared by all commands: options declared as structs, both spellings of flags, errors and exit codes."""

import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import typer

from varuna.environment import VarunaEnvironment, misspelt_variables
from varuna.errors import VarunaError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, without tab and newline."""
COLOURS = re.compile(r"(\x1b\[[0-9;:]*m)")
"""Escape sequences that set colours and styles of text."""
END_OF_COLOURS = "\x1b[0m"

Options = TypeVar("Options", bound=msgspec.Struct)


class InvalidInput(VarunaError):
    """An argument, or a file that an argument names, is invalid."""


@contextmanager
def exit_2_on_error() -> Iterator[None]:
    """Report errors as invalid input: exit status 2 instead of 1. Also works as a decorator."""
    try:
        yield
    except (VarunaError, ValueError, OSError) as error:
        raise InvalidInput(str(error)) from error


def new_app(**settings: Any) -> typer.Typer:
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, **settings)


def add_command(
    app: typer.Typer,
    function: Callable[..., None],
    name: str | None = None,
    *,
    ends_with_script: bool = False,
    variables: str | None = None,
) -> None:
    """Add a command. It accepts `-` and `_` alike in its flags: `--batch-size` and `--batch_size`.

    With `ends_with_script`, all arguments from the first positional one on belong to that script. With
    `variables`, environment variables that begin with it set options that are not given.
    """
    settings: dict[str, Any] = {
        "token_normalize_func": lambda flag: flag.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": not ends_with_script,
        "auto_envvar_prefix": variables,
    }
    app.command(name, context_settings=settings)(function)


def takes(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Give `command(options)` a parameter for each field of the struct, so structs can share options."""

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            command(kind(**values))

        hints = get_type_hints(kind, include_extras=True)
        parameters = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=hints[field.name],
                default=inspect.Parameter.empty if field.default is msgspec.NODEFAULT else field.default,
            )
            for field in msgspec.structs.fields(kind)
        ]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = hints
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def run_app(app: typer.Typer, program: str) -> None:
    """Run a command. Print an error that the user can fix as one line, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without Unicode must not end a job
        sys.stdout.reconfigure(errors="backslashreplace")
    for text in misspelt_variables(os.environ):
        warn(text)
    try:
        app(prog_name=program)
    except (VarunaError, ValueError, OSError, ImportError) as error:
        if VarunaEnvironment.read(os.environ).debug == "1":
            raise
        warn(str(error))
        sys.exit(2 if isinstance(error, InvalidInput) else 1)


def warn(text: str) -> None:
    """Print one line to stderr."""
    print("varuna:", printable(" ".join(text.split())), file=sys.stderr)


def say(text: str, *, error: bool = False) -> None:
    """Print progress of a job. The text may have several lines."""
    with suppress(OSError):  # the terminal is gone, or its file is on a full disk: the job continues
        print(f"varuna: {printable(text)}", file=sys.stderr if error else sys.stdout, flush=True)


def printable(text: str) -> str:
    """Escape control characters: text from other machines must not control the terminal."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def only_colours(text: str) -> str:
    """Escape control characters other than colours: output of workers must not control the terminal."""
    parts = COLOURS.split(text)
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))


def worker_line(rank: int, line: str) -> str:
    """Return a line of a worker's output for the terminal. Its colours end with it."""
    shown = only_colours(line)
    end = END_OF_COLOURS if COLOURS.search(line) else ""
    return f"[rank {rank}] {shown}{end}"
