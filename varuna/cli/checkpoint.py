"""The commands `varuna checkpoint ls`, `verify`, `export` and `import`. They need no running job."""

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import varuna
from varuna.checkpoint.format.manifest import Facts
from varuna.checkpoint.load import (
    CheckpointStatus,
    all_checkpoints,
    newest_complete,
    open_checkpoint,
    status_of,
    steps_in,
)
from varuna.checkpoint.load import verify as verify_bytes
from varuna.checkpoint.store.store import Owner, Store, local_folder, open_store, retrying
from varuna.cli.options import AsJson, add_command, new_app, warn
from varuna.errors import CheckpointError
from varuna.units import format_bytes, parse_bytes

RETRY_SECONDS = 60.0

StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="Folder, or URL that fsspec opens, such as s3://bucket/folder.")
]
ExportDtype = StrEnum("ExportDtype", ["bfloat16", "float16", "float32"])
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing data.")]


class CheckpointRow(msgspec.Struct, frozen=True):
    """One checkpoint in a list."""

    step: int
    state: str  # complete, interrupted or broken
    newest: bool  # of the complete ones
    problem: str = ""
    iteration: int | None = None
    num_bytes: int | None = None
    num_tensors: int | None = None
    replicas: tuple[int, ...] = ()  # per stage of the layout that saved it; empty if imported
    batch_size: int | None = None
    created: str = ""
    job: str = ""


def list_checkpoints(store_url: StoreArgument, as_json: AsJson = False) -> None:
    """List the checkpoints of a store, oldest first."""
    store = existing_store(store_url)
    found = all_checkpoints(store)
    newest = max((one.step for one in found if not one.problem), default=None)
    rows = [row_of(one, newest=one.step == newest) for one in found]
    if as_json:
        listing = {"store": store.url, "newest": newest, "checkpoints": rows}
        typer.echo(msgspec.json.format(msgspec.json.encode(listing)))
    elif rows:
        # Do not wrap lines in a file or a pipe.
        Console(width=None if sys.stdout.isatty() else 1000).print(checkpoint_table(rows))
        for row in rows:
            if row.problem:
                typer.echo(f"{row.step}: {row.problem}")
    else:
        typer.echo(f"{store.url} holds no checkpoints")


def verify(
    store_url: StoreArgument,
    step: Annotated[
        int | None, typer.Argument(help="Step of the checkpoint. Default: the newest complete checkpoint.")
    ] = None,
    all_steps: Annotated[bool, typer.Option("--all", help="Verify all checkpoints of the store.")] = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its hash."""
    if all_steps and step is not None:
        raise ValueError(f"--all and the step {step} exclude each other (give one of them)")
    store = existing_store(store_url)
    if all_steps:
        found = all_checkpoints(store)
    else:
        found = [status_of(store, open_checkpoint(store, None).manifest.facts.step if step is None else step)]
    if not found:
        raise CheckpointError(f"{store.url} holds no checkpoints")
    broken: set[int] = set()
    for one in found:
        problems = problems_of(store, one)
        if not problems:
            assert one.manifest is not None
            size = format_bytes(one.manifest.num_bytes)
            typer.echo(f"checkpoint {one.step}: intact, {len(one.manifest.tensors)} tensors, {size}")
        elif not all_steps or one.step in steps_in(store):  # otherwise its job removed it meanwhile
            broken.add(one.step)
            typer.echo("\n  ".join([f"checkpoint {one.step}: broken", *problems]))
    if step is None and not all_steps:
        for newer in (one for one in all_checkpoints(store) if one.step > found[0].step and one.problem):
            typer.echo(f"note: checkpoint {newer.step} is newer, but not complete: {newer.problem}")
    if broken:
        good = [one.step for one in all_checkpoints(store) if not one.problem and one.step not in broken]
        newest = "no complete checkpoint is left"
        if good:
            unread = "" if all_steps else " (its sizes are right; its bytes were not read)"
            newest = f"the newest complete checkpoint is step {max(good)}{unread}"
        are = "is" if len(broken) == 1 else "are"
        raise CheckpointError(f"{len(broken)} of {len(found)} verified {are} broken; {newest}")


def export_checkpoint(
    store_url: StoreArgument,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="x.pt, x.pth or x.bin: a state_dict. x.safetensors: one file. Any other name: a folder that "
            "Hugging Face's from_pretrained reads.",
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint. Default: the newest complete checkpoint.")
    ] = None,
    dtype: Annotated[ExportDtype | None, typer.Option(help="Convert floating point tensors.")] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Maximum size of a file in an exported folder.")
    ] = "5GB",
    config: Annotated[Path | None, typer.Option(help="Copy this config.json to the exported folder.")] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="Write {model, optimizer, iteration}. Only for x.pt.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write the model of a checkpoint to files that other programs read."""
    max_shard_bytes = parse_bytes(max_shard_size)
    store = existing_store(store_url)
    source = open_checkpoint(store, step)

    from varuna.checkpoint.transfer import bytes_to_export, export

    num_bytes = bytes_to_export(source.manifest, with_optimizer=with_optimizer)
    with progress_bar("exporting", num_bytes) as advance:
        files = export(
            source,
            out,
            dtype=None if dtype is None else dtype.value,
            max_shard_bytes=max_shard_bytes,
            config=config,
            with_optimizer=with_optimizer,
            overwrite=overwrite,
            on_bytes=advance,
        )
    size = sum(file.stat().st_size for file in files)
    typer.echo(f"checkpoint {source.manifest.facts.step} of {store.url} -> {out}: {format_bytes(size)}")


def import_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help=".safetensors file, torch.save file, or Hugging Face folder."),
    ],
    store_url: StoreArgument,
    step: Annotated[int, typer.Option(min=0, help="Step of the new checkpoint.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Create a checkpoint from the weights of a model, for a job to load."""
    from varuna.checkpoint.transfer import import_state, read_source

    store = retrying(open_store(store_url), seconds=RETRY_SECONDS, on_wait=warn)
    token = secrets.token_hex(6)
    facts = Facts(
        step=step,
        iteration=0,
        attempt=token,
        job=f"import-{token}",
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions={"varuna": varuna.__version__, "torch": version("torch")},
    )
    owner = Owner(facts.job, token, socket.gethostname(), os.getpid())
    state = read_source(source)
    with progress_bar("importing", sum(tensor.nbytes for tensor in state.values())) as advance:
        manifest = import_state(store, state, facts, owner, overwrite=overwrite, on_bytes=advance)
    typer.echo(
        f"{source} -> checkpoint {step} of {store.url}: {len(manifest.tensors)} tensors, "
        f"{format_bytes(manifest.num_bytes)}"
    )
    if (other := newest_complete(store)) != step:
        typer.echo(f"note: the newest complete checkpoint of this store is step {other}")


app = new_app(no_args_is_help=True, help="Manage checkpoints without the job that saved them.")
add_command(app, list_checkpoints, "ls")
add_command(app, verify)
add_command(app, export_checkpoint, "export")
add_command(app, import_checkpoint, "import")


def row_of(found: CheckpointStatus, *, newest: bool) -> CheckpointRow:
    state = "complete" if not found.problem else "interrupted" if found.interrupted else "broken"
    row = CheckpointRow(found.step, state, newest, found.problem)
    if found.manifest is None:
        return row
    facts = found.manifest.facts
    return msgspec.structs.replace(
        row,
        iteration=facts.iteration,
        num_bytes=found.manifest.num_bytes,
        num_tensors=len(found.manifest.tensors),
        replicas=() if facts.plan is None else facts.plan.widths,
        batch_size=None if facts.plan is None else facts.plan.batch_size,
        created=facts.created,
        job=facts.job,
    )


def checkpoint_table(rows: Sequence[CheckpointRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "iteration", "state", "size", "tensors"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for name in ("layout", "created", "job"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            str(row.step),
            "-" if row.iteration is None else str(row.iteration),
            "complete, newest" if row.newest else row.state,
            "-" if row.num_bytes is None else format_bytes(row.num_bytes),
            "-" if row.num_tensors is None else str(row.num_tensors),
            format_layout(row),
            row.created or "-",
            row.job or "-",
            style="green" if row.newest else "red" if row.state == "broken" else None,
        )
    return table


def format_layout(row: CheckpointRow) -> str:
    """Return stages x replicas and the batch size."""
    if not row.replicas:
        return "-"
    equal = len({*row.replicas}) == 1
    width = str(row.replicas[0]) if equal else f"({', '.join(map(str, row.replicas))})"
    return f"{len(row.replicas)} x {width}, batch {row.batch_size}"


def problems_of(store: Store, found: CheckpointStatus) -> list[str]:
    """Return the known problems of a checkpoint, and those that reading the rest of it finds."""
    known = found.problem.split("; ") if found.problem else []
    if found.manifest is None:
        return known
    try:
        rest = open_checkpoint(store, found.step, check_complete=False)
    except CheckpointError as error:  # it has changed since it was found
        return [*known, str(error)]
    with progress_bar(f"reading checkpoint {found.step}", rest.manifest.num_bytes) as advance:
        return known + verify_bytes(rest, on_bytes=advance)


def existing_store(url: str) -> Store:
    folder = local_folder(url)
    if folder is not None and not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder} (check the path, and that the disk is mounted)")
    return retrying(open_store(url), seconds=RETRY_SECONDS, on_wait=warn)


@contextmanager
def progress_bar(description: str, total_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr if it is a terminal. Yield a function to call with each number of bytes done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    hide = not console.is_terminal
    with Progress("{task.description}", *columns, console=console, transient=True, disable=hide) as bar:
        task = bar.add_task(description, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
