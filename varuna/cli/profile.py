"""The command `varuna profile`: measures the model that a function of the user's script returns.

Under a launcher such as torchrun, all ranks run it together.
"""

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from varuna.errors import VarunaError
from varuna.plan import tables
from varuna.units import read_numbers

KEYS = (
    *("model", "get_batch", "optimizer"),
    *("batch_dims", "loss", "shared_weights", "initialize", "message_bytes", "effort"),
)


def profile(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:FUNCTION",
            help="Function without arguments. It returns the model, get_batch(size) and, if not AdamW, a "
            "function that makes the optimizer.",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="sys.argv of the script.")
    ] = None,
    sizes: Annotated[str, typer.Option(help="Micro-batch sizes to measure, in samples.")] = "1,2,4,8",
    out: Annotated[
        Path, typer.Option(help="Folder of the profile. New measurements are added to an existing profile.")
    ] = Path("profiles"),
    precision: Annotated[str, typer.Option(help="Training precision: fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1 or a number. Default: a GPU if there is one.")
    ] = "",
    per_machine: Annotated[
        int | None, typer.Option(help="Devices per machine. CPU workers share the machine's memory.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", "--anew", help="Discard earlier measurements.")
    ] = False,
) -> None:
    """Measure the costs of a model on this kind of device. All later plans use them."""
    microbatch_sizes = read_numbers(sizes, "--sizes")
    profiled_device = read_device(device)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in workers
    made = load_model(target, arguments or [])

    from varuna.profile.profiler import Profiler

    optimizer = made.pop("optimizer", None)
    profiler = Profiler(
        made.pop("model"),
        made.pop("get_batch"),
        device=profiled_device,
        gpus_per_node=per_machine,
        out_folder=out,
        precision=precision,  # type: ignore[arg-type]  # the Profiler checks it
        add_to_existing=not restart,
        **made,
    )
    if optimizer is not None:
        profiler.set_optimizer(optimizer)
    found = profiler.profile_all(microbatch_sizes)
    if int(os.environ.get("RANK", 0)) == 0:
        measured = sorted({size.microbatch_size for kind in found.kinds for size in kind.sizes})
        file, spans = out / "profile.json", tables.spans(measured)
        typer.echo(f"{file}: {tables.facts(found)[0]}; micro-batches of {spans}")
        for note in found.notes:
            typer.echo(f"not measured: {note}")
        typer.echo(f"next: varuna plan {out} --devices N --per-machine K --batch-size B")


def read_device(text: str) -> int | str:
    """Return a device name, a number, or -1: this rank's GPU, or the CPU if there is none."""
    if not re.fullmatch(r"|[0-9]+|(cpu|cuda)(:[0-9]+)?", text):
        raise ValueError(f"--device must be cpu, cuda, cuda:N or a number, not {text!r}")
    return text if text.startswith("c") else int(text or -1)


def load_model(target: str, arguments: list[str]) -> dict[str, Any]:
    """Call the user's function. Return its results by name."""
    return name_results(call_function(target, arguments), target)


def call_function(target: str, arguments: list[str]) -> object:
    """Call the function that SCRIPT:FUNCTION names, and return its result."""
    source, _, name = target.rpartition(":")
    if not source or not name:
        raise ValueError(f"{target!r} names no function (write SCRIPT:FUNCTION, such as train.py:make_model)")
    with script_environment(source, arguments):
        module = import_script(source)
        function = getattr(module, name, None)
        if not callable(function):
            known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
            raise ValueError(f"{source} has no function {name!r} (it has {', '.join(known) or 'none'})")
        with show_user_errors(target):
            return function()


def name_results(made: object, target: str) -> dict[str, Any]:
    if isinstance(made, tuple) and len(made) in (2, 3):
        made = dict(zip(KEYS, made, strict=False))
    if not isinstance(made, Mapping) or not {"model", "get_batch"} <= {*made}:
        what = f"a dict of {', '.join(map(str, made))}" if isinstance(made, Mapping) else type(made).__name__
        raise ValueError(
            f"{target} returned {what}; it must return (model, get_batch), (model, get_batch, optimizer), or "
            "a dict of these and other arguments of varuna.Profiler"
        )
    if unknown := [str(key) for key in made if key not in KEYS]:
        raise ValueError(f"{target} returned a dict with {', '.join(unknown)}; known are {', '.join(KEYS)}")
    return dict(made)


@contextlib.contextmanager
def script_environment(source: str, arguments: list[str]) -> Iterator[None]:
    """Set sys.argv and sys.path as if Python had started the script."""
    before = sys.argv, list(sys.path)
    sys.argv = [source, *arguments]
    sys.path.insert(0, str(Path(source).resolve().parent) if source.endswith(".py") else os.getcwd())
    try:
        yield
    finally:
        sys.argv = before[0]
        sys.path[:] = before[1]


def import_script(source: str) -> ModuleType:
    """Import a file, or a module by its dotted name."""
    if not source.endswith(".py"):
        with show_user_errors(source):
            return importlib.import_module(source)
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no script {source}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for code that looks up the module of a class
    with show_user_errors(source):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def show_user_errors(source: str) -> Iterator[None]:
    """Print the traceback of an error in the user's code, without frames of this file.

    A script that exits is an error, too: its status 0 would look like a successful command.
    """
    try:
        yield
    except SystemExit as error:
        raise VarunaError(
            f"{source} exited with status {error.code or 0} (put code that runs and exits under "
            'if __name__ == "__main__")'
        ) from error
    except Exception as error:
        frames, own = error.__traceback__, (__file__, contextlib.__file__, "<frozen importlib")
        while frames and frames.tb_frame.f_code.co_filename.startswith(own):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
        raise VarunaError(f"{source} raised {type(error).__name__}: {error}") from error
