"""Logging by component, configured by RaNNC's `logging.toml`: sinks, and a level for each component.

Several components of RaNNC map to one logger of this library. This module imports no torch.
"""

import logging
import sys
import tomllib
from pathlib import Path
from typing import Any

FILE = "logging.toml"
COMPONENTS = {
    "root": "pyrannc",
    "RaNNCModule": "pyrannc",
    "RaNNCProcess": "pyrannc.process",
    "Decomposer": "pyrannc.plan",
    "Decomposition": "pyrannc.plan",
    "MLPartitioner": "varuna",
    "DPStaging": "pyrannc.plan",
    "GraphProfiler": "pyrannc.measure",
    "ProfilerUtil": "pyrannc.measure",
}
LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "err": logging.ERROR,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}
PATTERN = "[%(asctime)s] [%(levelname).1s] <%(name)s>: %(message)s"


def configure_logging(folder: Path) -> None:
    """Read `logging.toml`, if the folder has one; raise ValueError with the key of a bad value."""
    path = folder / FILE
    try:
        settings = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    sinks = {str(sink.get("name")): _handler(sink, path) for sink in settings.get("sink", ())}
    for component in settings.get("logger", ()):
        name, level = str(component.get("name")), str(component.get("level", "info"))
        if level not in LEVELS:
            raise ValueError(
                f"{path}: the level of {name} is {level!r} (expected one of {', '.join(LEVELS)})"
            )
        logger = logging.getLogger(COMPONENTS.get(name, f"pyrannc.{name}"))
        logger.setLevel(LEVELS[level])
        for sink in component.get("sinks", ()):
            if sink not in sinks:
                raise ValueError(f"{path}: {name} names the sink {sink!r}, which is not defined (add it)")
            if sinks[sink] not in logger.handlers:
                logger.addHandler(sinks[sink])
                logger.propagate = False


def _handler(sink: dict[str, Any], path: Path) -> logging.Handler:
    kind = str(sink.get("type", ""))
    if "file" in kind:
        if "filename" not in sink:
            raise ValueError(f"{path}: the sink {sink.get('name')!r} has no filename")
        handler: logging.Handler = logging.FileHandler(sink["filename"])
    else:
        handler = logging.StreamHandler(sys.stderr if "stderr" in kind else sys.stdout)
    handler.setFormatter(logging.Formatter(PATTERN))
    return handler
