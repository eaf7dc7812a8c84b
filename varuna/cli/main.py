"""The command `varuna`.

It starts quickly: torch is imported only by the commands that touch tensors.
"""

import functools
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

import varuna
from varuna.checkpoint.format.manifest import Facts
from varuna.checkpoint.load import Found, find, look, newest, open_checkpoint, steps_in
from varuna.checkpoint.load import verify as read_every_byte
from varuna.checkpoint.store.store import Owner, Store, local_folder, open_store, retrying
from varuna.cli import jobs as managing
from varuna.cli import plan as planning
from varuna.cli import profile as profile_script
from varuna.environment import VarunaEnvironment
from varuna.errors import CheckpointError, VarunaError

RETRY_SECONDS = 60.0
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train on many devices as on one.",
)
checkpoint = typer.Typer(
    no_args_is_help=True, help="Look after checkpoints, without the job that wrote them."
)
app.add_typer(checkpoint, name="checkpoint")


class Refused(VarunaError):
    """What was typed, or a file that was named, asks for what cannot be."""


def refusing(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except (VarunaError, ValueError, OSError) as error:
            raise Refused(str(error)) from error

    return run


for command in (profile_script.profile, planning.plan, planning.explain, planning.show, planning.simulate):
    app.command()(refusing(command))
managing.register(app)


def main() -> None:
    """What a user can mend is told in one line; the debug variable shows where it arose."""
    try:
        app(prog_name="varuna")
    except (VarunaError, ValueError, OSError, ImportError) as error:
        if VarunaEnvironment.read(os.environ).debug == "1":
            raise
        say(str(error))
        sys.exit(2 if isinstance(error, Refused) else 1)


def say(text: str) -> None:
    print("varuna:", " ".join(text.split()), file=sys.stderr)


@app.callback(invoke_without_command=True)
def start(
    show: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show:
        typer.echo(f"varuna {varuna.__version__}")
        raise typer.Exit


# ---------------------------------------------------------------- varuna checkpoint

StoreArgument = Annotated[
    str, typer.Argument(metavar="STORE", help="A folder, or a URL that fsspec opens (s3://bucket/folder).")
]


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Row(msgspec.Struct, frozen=True):
    """One checkpoint in a list."""

    step: int
    state: str  # complete, interrupted or broken
    newest: bool  # of the complete ones
    problem: str = ""
    iteration: int | None = None
    num_bytes: int | None = None
    num_tensors: int | None = None
    replicas: tuple[int, ...] = ()  # of each stage of the layout that wrote it; none for an imported one
    batch_size: int | None = None
    created: str = ""
    job: str = ""


class Listing(msgspec.Struct, frozen=True):
    store: str
    newest: int | None
    checkpoints: list[Row]


@checkpoint.command("ls")
def list_checkpoints(
    store_url: StoreArgument,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List what a store holds, oldest first."""
    listing = listing_of(existing_store(store_url))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(listing)))
    elif listing.checkpoints:
        # Where nobody looks, a line is as long as it needs to be.
        Console(width=None if sys.stdout.isatty() else 1000).print(table_of(listing.checkpoints))
        for row in listing.checkpoints:
            if row.problem:
                typer.echo(f"{row.step}: {row.problem}")
    else:
        typer.echo(f"{listing.store} holds no checkpoints")


@checkpoint.command()
def verify(
    store_url: StoreArgument,
    step: Annotated[int | None, typer.Argument(help="The newest complete one if not given.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All that the store holds.")] = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its hash."""
    if every and step is not None:
        raise ValueError(f"--all and the step {step} exclude each other (give one of them)")
    store = existing_store(store_url)
    if every:
        found = find(store)
    else:
        found = [look(store, open_checkpoint(store, None).manifest.facts.step if step is None else step)]
    if not found:
        raise CheckpointError(f"{store.url} holds no checkpoints")
    broken: set[int] = set()
    for one in found:
        problems = problems_of(store, one)
        if problems and every and one.step not in steps_in(store):
            continue  # removed by its job since it was found
        typer.echo(f"checkpoint {one.step}: {verdict(one, problems)}")
        for problem in problems:
            typer.echo(f"  {problem}")
        if problems:
            broken.add(one.step)
    if step is None and not every:
        for newer in (one for one in find(store) if one.step > found[0].step and one.problem):
            typer.echo(f"note that checkpoint {newer.step} is newer, but not complete: {newer.problem}")
    if broken:
        raise CheckpointError(
            f"{len(broken)} of {len(found)} verified {'is' if len(broken) == 1 else 'are'} not whole; "
            + way_out(find(store), broken, all_were_read=every)
        )


@checkpoint.command("export")
def export_checkpoint(
    store_url: StoreArgument,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="x.pt, x.pth or x.bin: a state_dict. x.safetensors: one file. Anything else: a folder that "
            "Hugging Face's from_pretrained reads.",
        ),
    ],
    step: Annotated[int | None, typer.Option(help="The newest complete one if not given.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Convert floating point tensors.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of the files in a folder.")] = "5GB",
    config: Annotated[Path | None, typer.Option(help="A config.json to put into the folder.")] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="In a .pt: {model, optimizer, iteration}.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write the model of a checkpoint to files that other programs read."""
    max_shard_bytes = parse_bytes(max_shard_size)
    store = existing_store(store_url)
    source = open_checkpoint(store, step)

    from varuna.checkpoint.transfer import bytes_to_export, export

    with progress("exporting", bytes_to_export(source.manifest, with_optimizer=with_optimizer)) as advance:
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
    typer.echo(f"checkpoint {source.manifest.facts.step} of {store.url} -> {out}: {show_bytes(size)}")


@checkpoint.command("import")
def import_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="A .safetensors file, one of torch.save, or a folder of Hugging Face."
        ),
    ],
    store_url: StoreArgument,
    step: Annotated[int, typer.Option(min=0, help="The step that the checkpoint will be of.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint of that step.")
    ] = False,
) -> None:
    """Make a checkpoint of a model's weights, for a job to start from."""
    from varuna.checkpoint.transfer import import_state, read_source

    store = patient(open_store(store_url))
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
    with progress("importing", sum(tensor.nbytes for tensor in state.values())) as advance:
        manifest = import_state(store, state, facts, owner, overwrite=overwrite, on_bytes=advance)
    typer.echo(
        f"{source} -> checkpoint {step} of {store.url}: {len(manifest.tensors)} tensors, "
        f"{show_bytes(manifest.num_bytes)}"
    )
    if (other := newest(store)) != step:
        typer.echo(f"note that the newest complete checkpoint there is of step {other}")


# ---------------------------------------------------------------- how it is told


def listing_of(store: Store) -> Listing:
    found = find(store)
    best = max((one.step for one in found if not one.problem), default=None)
    return Listing(store.url, best, [row_of(one, newest=one.step == best) for one in found])


def row_of(found: Found, *, newest: bool) -> Row:
    state = "complete" if not found.problem else "interrupted" if found.interrupted else "broken"
    row = Row(found.step, state, newest, found.problem)
    if found.manifest is None:
        return row
    facts = found.manifest.facts
    return msgspec.structs.replace(
        row,
        iteration=facts.iteration,
        num_bytes=found.manifest.num_bytes,
        num_tensors=len(found.manifest.tensors),
        replicas=() if facts.plan is None else tuple(len(stage.ranks) for stage in facts.plan.stages),
        batch_size=None if facts.plan is None else facts.plan.batch_size,
        created=facts.created,
        job=facts.job,
    )


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "iteration"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("size", "tensors"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("layout", "created", "job"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            str(row.step),
            "-" if row.iteration is None else str(row.iteration),
            "complete, newest" if row.newest else row.state,
            "-" if row.num_bytes is None else show_bytes(row.num_bytes),
            "-" if row.num_tensors is None else str(row.num_tensors),
            show_layout(row),
            row.created or "-",
            row.job or "-",
            style="green" if row.newest else "red" if row.state == "broken" else None,
        )
    return table


def show_layout(row: Row) -> str:
    """Stages x replicas, and the batch."""
    if not row.replicas:
        return "-"
    alike = len({*row.replicas}) == 1
    width = str(row.replicas[0]) if alike else f"({', '.join(map(str, row.replicas))})"
    return f"{len(row.replicas)} x {width}, batch {row.batch_size}"


def problems_of(store: Store, found: Found) -> list[str]:
    """What is known to be wrong, and what reading the rest brings to light."""
    known = found.problem.split("; ") if found.problem else []
    if found.manifest is None:
        return known
    try:
        rest = open_checkpoint(store, found.step, check_complete=False)
    except CheckpointError as error:  # it has changed since it was found
        return [*known, str(error)]
    with progress(f"reading checkpoint {found.step}", rest.manifest.num_bytes) as advance:
        return known + read_every_byte(rest, on_bytes=advance)


def verdict(found: Found, problems: Sequence[str]) -> str:
    if problems:
        return "not whole"
    assert found.manifest is not None
    return f"whole, {len(found.manifest.tensors)} tensors, {show_bytes(found.manifest.num_bytes)}"


def way_out(found: Sequence[Found], broken: set[int], *, all_were_read: bool) -> str:
    good = [one.step for one in found if not one.problem and one.step not in broken]
    if not good:
        return "there is no complete one"
    return f"the newest complete one is of step {max(good)}" + (
        "" if all_were_read else " (its sizes are right; its bytes were not read)"
    )


def show_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in UNITS or float(match[1]) == 0:
        raise ValueError(f'a size is a number and a unit, as "5GB", "500MB" or "2GiB"; found {text!r}')
    return int(float(match[1]) * UNITS[match[2]])


def existing_store(url: str) -> Store:
    folder = local_folder(url)
    if folder is not None and not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder} (is the path right, and the disk mounted?)")
    return patient(open_store(url))


def patient(store: Store) -> Store:
    return retrying(store, seconds=RETRY_SECONDS, on_wait=say)


@contextmanager
def progress(doing: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar on stderr while a person looks; what to call with every number of bytes done."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    with Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)
