"""The command `varuna profile`: measures the model that a function of the user's script returns.

Started under a launcher (torchrun), all ranks run it together.
"""

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from varuna.errors import VarunaError
from varuna.plan import tables
from varuna.types import PrecisionName, Profile
from varuna.units import read_numbers

FORM = (
    "it must return (model, get_batch), (model, get_batch, optimizer), or a dict of these and of what else "
    "varuna.Profiler takes"
)
KEYS = (
    *("model", "get_batch", "optimizer"),
    *("batch_dims", "shared_weights", "initialize", "message_bytes", "effort"),
)


def profile(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:FUNCTION",
            help="A function without arguments that returns the model, get_batch(size) and, if it is not "
            "AdamW, what makes the optimizer.",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="What the script finds in sys.argv.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Micro-batch sizes to measure.")] = "1,2,4,8",
    out: Annotated[Path, typer.Option(help="The folder of the profile; what it has is kept.")] = Path(
        "profiles"
    ),
    precision: Annotated[str, typer.Option(help="In which it will train: fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; a GPU if there is one.")] = "",
    per_machine: Annotated[
        int | None, typer.Option(help="Devices of one machine, which share its memory if they are CPUs.")
    ] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Forget what was measured before.")] = False,
) -> None:
    """Measure what a model costs on this kind of device, once for all plans."""
    wanted = read_numbers(sizes, "--sizes")
    where = read_device(device)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as workers will have it
    made = load(target, arguments or [])

    from varuna.profile.profiler import Profiler

    optimizer = made.pop("optimizer", None)
    profiler = Profiler(
        made.pop("model"),
        made.pop("get_batch"),
        device=where,
        gpus_per_node=per_machine,
        out_folder=out,
        precision=as_precision(precision),
        add_to_existing=not anew,
        **made,
    )
    if optimizer is not None:
        profiler.set_optimizer(optimizer)
    found = profiler.profile_all(wanted)
    if int(os.environ.get("RANK", 0)) == 0:
        tell(found, out)


def read_device(text: str) -> int | str:
    """A number, or a name with or without one; -1, this rank's GPU or else the CPU, where nothing is said."""
    if not re.fullmatch(r"|[0-9]+|(cpu|cuda)(:[0-9]+)?", text):
        raise ValueError(f"--device {text!r} must be cpu, cuda, one of several as in cuda:1, or a number")
    return text if text.startswith("c") else int(text or -1)


def as_precision(text: str) -> PrecisionName:
    return text  # type: ignore[return-value]  # the Profiler checks it


def tell(found: Profile, folder: Path) -> None:
    sizes = sorted({size.microbatch_size for kind in found.kinds for size in kind.sizes})
    typer.echo(f"{folder / 'profile.json'}: {tables.facts(found)[0]}; micro-batches of {tables.spans(sizes)}")
    for note in found.notes:
        typer.echo(f"not measured: {note}")
    typer.echo(f"next: varuna plan {folder} --devices N --per-machine K --batch-size B")


# ---------------------------------------------------------------- the user's script


def load(target: str, arguments: list[str]) -> dict[str, Any]:
    """What the function returns, by name."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise ValueError(f"{target!r} names no function (write SCRIPT:FUNCTION, as in train.py:make_model)")
    with acting_as(source, arguments):
        module = import_script(source)
        function = getattr(module, name, None)
        if not callable(function):
            there = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
            raise ValueError(f"{source} has no function {name!r} (there are {', '.join(there) or 'none'})")
        with blaming(target):
            made = function()
    return by_name(made, target)


def by_name(made: object, target: str) -> dict[str, Any]:
    if isinstance(made, tuple) and len(made) in (2, 3):
        made = dict(zip(KEYS, made, strict=False))
    if not isinstance(made, Mapping) or not {"model", "get_batch"} <= {*made}:
        what = f"a dict of {', '.join(map(str, made))}" if isinstance(made, Mapping) else type(made).__name__
        raise ValueError(f"{target} returned {what}; {FORM}")
    if unknown := [str(key) for key in made if key not in KEYS]:
        raise ValueError(f"{target} returned a dict with {', '.join(unknown)}; known are {', '.join(KEYS)}")
    return dict(made)


@contextmanager
def acting_as(source: str, arguments: list[str]) -> Iterator[None]:
    """As if the script had been started: its folder on the path, its arguments in argv."""
    before = sys.argv, list(sys.path)
    sys.argv = [source, *arguments]
    sys.path.insert(0, str(Path(source).resolve().parent) if source.endswith(".py") else os.getcwd())
    try:
        yield
    finally:
        sys.argv = before[0]
        sys.path[:] = before[1]


def import_script(source: str) -> ModuleType:
    """A file, or a module by its dotted name."""
    if not source.endswith(".py"):
        with blaming(source):
            return importlib.import_module(source)
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that its classes can be found by whoever looks
    with blaming(source):
        spec.loader.exec_module(module)
    return module


OURS = (__file__, contextlib.__file__, "<frozen importlib")


@contextmanager
def blaming(whose: str) -> Iterator[None]:
    """What goes wrong in the user's own code is shown where it did."""
    try:
        yield
    except Exception as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename.startswith(OURS):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
        raise VarunaError(f"{whose} raised {type(error).__name__}: {error}") from error
