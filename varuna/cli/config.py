"""Options of `varuna run` from varuna.toml and the environment: flags win, then variables, then the file.

[run]
machine_list = "machines.txt"
batch_size = 512
save_every = 300
"""

import difflib
import os
import tomllib
from collections.abc import Container, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgspec
import typer

from varuna.cli.options import exit_2_on_error
from varuna.environment import RUN_PREFIX
from varuna.observe.ledger import read_prices

CONFIG_FILE = "varuna.toml"
TABLE = "run"
NOT_IN_A_FILE = frozenset({"config", "show_config", "resume", "resume_step", "force", "help"})
"""Options that belong to one call of the command."""
PATHS = frozenset({"machine_list", "profile_folder", "plan", "env_file", "code_dir", "log_dir", "price"})
"""Options that name files: relative to the folder of the configuration file. A price may be a number."""
KINDS: dict[object, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
    str: ("text", (str, int, float)),
    list[str]: ('a list of texts, such as ["train.py", "--lr", "0.1"]', (list,)),
}
SOURCES = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
_parsed: ContextVar[typer.Context] = ContextVar("parsed")  # of the command that runs


def use_config(context: typer.Context, path: str | None, kind: type[msgspec.Struct]) -> str | None:
    """Take defaults of the options in `kind` from a file. The parser calls this before it parses them."""
    _parsed.set(context)
    with exit_2_on_error():
        _refuse_unknown_variables(os.environ, context)
        _refuse_wrong_variables(os.environ, kind)
        file = Path(CONFIG_FILE if path is None else path)
        if path is None and not file.is_file():
            return None
        context.default_map = read_config(file, kind)
    return str(file)


def read_config(file: Path, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the values of a file, by option. Raise ValueError that names the file and the key."""
    options = get_type_hints(kind)
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the configuration {str(file)!r}: {error.strerror}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise ValueError(f"{file} is no valid TOML file: {error}") from None
    for name, table in tables.items():
        if name != TABLE or not isinstance(table, dict):
            raise ValueError(
                f"{file}: {name!r} is not known (put the options of `varuna run` below a line [{TABLE}])"
            )
    found: dict[str, Any] = {}
    for key, value in tables.get(TABLE, {}).items():
        name = key.replace("-", "_")
        if name in NOT_IN_A_FILE:
            raise ValueError(f"{file}: {key!r} belongs to one call (pass it on the command line)")
        if name not in options:
            raise ValueError(f"{file}: {key!r} is not known{_nearest(name, set(options) - NOT_IN_A_FILE)}")
        if name in found:
            raise ValueError(f"{file}: {key!r} is given twice, with `-` and with `_`")
        found[name] = _checked(file, key, value, options[name])
        if name in PATHS and not (name == "price" and _is_a_price(found[name])):
            found[name] = str(file.parent / found[name])
    return found


def options_of_the_default_file() -> frozenset[str]:
    """Return the options whose values come from varuna.toml, which nobody named with --config."""
    context = _parsed.get()
    if _source(context, "config") != "default":
        return frozenset()
    return frozenset(name for name in context.params if _source(context, name) == "file")


def show_config(
    options: msgspec.Struct, *, defaults: Mapping[str, object], saved: Container[str] = ()
) -> str:
    """Return all options of the command with their values, and where these come from, one per line.

    `defaults`: the values of those that are not given; others have none. `saved`: those that come from the
    job that is resumed.
    """
    context, rows = _parsed.get(), []
    for name in sorted(context.params):
        if name in NOT_IN_A_FILE:
            continue
        value = getattr(options, name)
        values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        where = "saved job" if name in saved else "default" if not values else _source(context, name)
        if not values and name in defaults:
            values = [defaults[name]]
        rows.append((name, " ".join(map(str, values)) or "-", where))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {where}" for name, value, where in rows)


def _source(context: typer.Context, name: str) -> str:
    """Return where the value of an option comes from."""
    return SOURCES.get(getattr(context.get_parameter_source(name), "name", ""), "default")


def _is_a_price(text: str) -> bool:
    """Return whether the value of --price is not the name of a file."""
    try:
        read_prices(text, source="price")
    except ValueError:
        return False
    return True


def _checked(file: Path, key: str, value: Any, hint: object) -> Any:
    what, kinds = KINDS[_kind_of(hint)]
    fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if not fits or (isinstance(value, list) and not all(isinstance(one, str) for one in value)):
        raise ValueError(f"{file}: {key!r} must be {what}, not {value!r}")
    return str(value) if str in kinds else value


def _kind_of(hint: Any) -> Any:
    """Return the type of an option's values, without None."""
    return next(one for one in get_args(hint) if one is not NoneType) if NoneType in get_args(hint) else hint


def _refuse_wrong_variables(environment: Mapping[str, str], options: type[msgspec.Struct]) -> None:
    """Name the variable: the parser would name the flag, which nobody has given."""
    for name, hint in get_type_hints(options).items():
        kind, variable = _kind_of(hint), f"{RUN_PREFIX}_{name.upper()}"
        if kind in (int, float) and (text := environment.get(variable)):
            try:
                kind(text)
            except ValueError:
                what = f"the environment variable {variable} must be {KINDS[kind][0]}"
                raise ValueError(f"{what}, not {text!r}") from None


def _refuse_unknown_variables(environment: Mapping[str, str], context: typer.Context) -> None:
    """Arguments, such as the script, have no variable."""
    options = [one.name for one in context.command.params if one.param_type_name == "option" and one.name]
    known = {f"{RUN_PREFIX}_{name.upper()}" for name in options}
    for variable in environment:
        if variable.startswith(f"{RUN_PREFIX}_") and variable not in known:
            raise ValueError(f"the environment variable {variable} is not known{_nearest(variable, known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else " (`varuna run --help` lists all options)"
