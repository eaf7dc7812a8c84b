"""The command `varuna verify`: does the model of a script train as in one plain process, at every layout?"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from varuna.cli.options import AsJson, InvalidInput
from varuna.cli.profile import call_function
from varuna.codec import encode
from varuna.observe.progress_bar import parts_progress


@contextmanager
def show_errors() -> Iterator[None]:
    """Report errors of arguments as one line."""
    try:
        yield
    except (TypeError, RuntimeError, MemoryError) as error:
        raise InvalidInput(str(error)) from error


Layouts = Annotated[
    str | None,
    typer.Option(
        help="STAGESxREPLICAS, or the replicas of each stage, with options: "
        "2x1,1x2:shard,2+1:recompute,2x2:gpipe:chunk=2. Default: a set of up to 15."
    ),
]


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT:FUNCTION",
            help="Function without arguments. It returns the model, sample inputs or get_batch(size) and, if "
            "you like, a function that makes the optimizer and make_batch(step).",
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="sys.argv of the script.")
    ] = None,
    layouts: Layouts = None,
    steps: Annotated[int, typer.Option(help="Training steps of each run.")] = 3,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per step. Default: those of the sample, or 8.")
    ] = None,
    face: Annotated[str, typer.Option(help="Interface to verify: varuna or pyrannc.")] = "varuna",
    precision: Annotated[
        str | None,
        typer.Option(help="fp64, fp32, bf16 or fp16. Default: fp64 if the model runs in it, else fp32."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that each run may take.")] = 120.0,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show the largest difference of every parameter and buffer, too."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Train at several layouts and in one plain process, on this machine's CPU, and compare all numbers.

    Exit status: 0 if all layouts are equal, 1 if one differs or is refused, 2 if one could not run.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in workers
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # forked processes cannot share a GPU
    made = call_function(target, arguments or [])

    from varuna.verification.subject import name_results
    from varuna.verification.verify import verify_made

    named: dict[str, Any] = name_results(made, target)
    with parts_progress() as progress, show_errors():
        report = verify_made(
            named,
            layouts=layouts,
            steps=steps,
            batch_size=batch_size,
            face=face,  # type: ignore[arg-type]  # checked there
            precision=precision,
            timeout_seconds=timeout,
            progress=progress,
        )
    if verbose and not json:
        typer.echo(f"{report.tensor_table()}\n")
    typer.echo(encode(report) if json else str(report))
    raise typer.Exit(report.exit_code)
