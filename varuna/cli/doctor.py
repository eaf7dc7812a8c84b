"""The command `varuna doctor`: checks this machine, the other machines and the store before a job starts."""

import importlib.metadata
import os
import platform
import resource
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

import varuna
from varuna.addresses import address_facing
from varuna.cli.options import AsJson, exit_2_on_error, printable
from varuna.cli.run import read_file
from varuna.codec import encode
from varuna.environment import variable_name
from varuna.morph.machines import is_loopback, read_machines, require_machines
from varuna.morph.run.job_folder import home_folder
from varuna.morph.starters.ssh import OPTIONS, explain_ssh_end
from varuna.units import format_bytes

OLDEST_TORCH = (2, 11)
FEWEST_FILES = 4096
SMALLEST_SHARED_MEMORY = 1 << 30
SSH_SECONDS = 30.0
ASKED_OF_MACHINES = "import varuna, torch; print(varuna.__version__, torch.__version__)"

Result = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """The result of one check, and what to do about it."""

    what: str
    result: Result
    found: str
    remedy: str = ""


def doctor(
    machine_list: Annotated[
        str | None, typer.Option(metavar="FILE", help="Check the machines of this list over ssh.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Check that checkpoints can be written here.")
    ] = None,
    ssh: Annotated[str, typer.Option(help="ssh client and its options.")] = "ssh",
    python: Annotated[str, typer.Option(help="Python on other machines.")] = sys.executable,
    json: AsJson = False,
) -> None:
    """Check torch, devices, network, limits, folders, machines and store; say what to fix.

    Exit status: 0 if a job can run, 1 if there is a problem.
    """
    with exit_2_on_error():
        machines: tuple[str, ...] = ()
        if machine_list is not None:
            data = read_file(machine_list, "machine list")
            machines = require_machines(read_machines(data, source=machine_list), source=machine_list)
    checks: list[Callable[[], Iterator[Finding]]] = [check_versions, check_torch, check_devices, check_limits]
    checks += [check_folders]
    checks += [lambda name=name: check_machine(name, ssh, python) for name in machines]  # type: ignore[misc]
    if store is not None:
        checks.append(lambda: check_store(store))
    findings = []
    for check in checks:
        for finding in check():
            findings.append(finding)
            if not json:
                show(finding)
    if json:
        typer.echo(encode(findings))
    raise typer.Exit(int(any(finding.result == "problem" for finding in findings)))


def show(finding: Finding) -> None:
    typer.echo(printable(f"{finding.result:<8} {finding.what}: {finding.found}"))
    if finding.remedy:
        typer.echo(printable(f"{'':<8} → {finding.remedy}"))


# ---------------------------------------------------------------- this machine


def check_versions() -> Iterator[Finding]:
    found = f"varuna {varuna.__version__}, Python {platform.python_version()}, {platform.system()}"
    if platform.system() == "Linux":
        yield Finding("versions", "ok", found)
    else:
        yield Finding("versions", "warning", found, "jobs on several machines are tested on Linux only")


def check_torch() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        yield Finding("torch", "problem", f"cannot be imported: {error}", "install torch 2.11 or newer")
        return
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH:
        yield Finding("torch", "problem", version, "install torch 2.11 or newer")
    else:
        yield Finding("torch", "ok", version)
    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("gloo", "problem", "this torch has none", "install a torch with torch.distributed")
        return
    yield from _check_gloo()


def _check_gloo() -> Iterator[Finding]:
    """Form a group of one rank over the network, as every job does."""
    program = (
        "import torch.distributed as d\n"
        "s = d.TCPStore('127.0.0.1', 0, 1, is_master=True)\n"
        "d.init_process_group('gloo', store=s, rank=0, world_size=1); d.barrier()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        yield Finding("gloo", "ok", "a process group forms on this machine")
    else:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        remedy = "name the interface of the job: GLOO_SOCKET_IFNAME=eth0"
        yield Finding("gloo", "problem", f"no process group forms: {last}", remedy)


def check_devices() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError):
        return
    count = torch.cuda.device_count()
    if not count:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        yield Finding("devices", "ok", f"no GPU; {cores} CPU cores")
        return
    for index in range(count):
        try:
            name = torch.cuda.get_device_name(index)
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            yield Finding(f"GPU {index}", "problem", str(error).splitlines()[0], "see nvidia-smi")
            continue
        found = f"{name}, {format_bytes(free)} of {format_bytes(total)} free"
        if free < 0.9 * total:
            yield Finding(f"GPU {index}", "warning", found, "another process uses it: see nvidia-smi")
        else:
            yield Finding(f"GPU {index}", "ok", found)
    pairs = [(a, b) for a in range(count) for b in range(count) if a < b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if pairs:
        found = "all GPUs reach each other" if not apart else f"no direct access: {apart[:4]}"
        yield Finding("GPU memory", "ok", f"{found}; stages use shared device memory where it is possible")
    import torch.distributed as dist

    if dist.is_nccl_available():
        nccl: Any = torch.cuda.nccl
        yield Finding("NCCL", "ok", ".".join(map(str, nccl.version())))
    else:
        yield Finding("NCCL", "warning", "this torch has none", "replicas reduce over gloo, which is slower")


def check_limits() -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < FEWEST_FILES:
        result: Result = "warning" if files >= 256 else "problem"
        remedy = f"ulimit -n {most if most > 0 else 65536}"
        yield Finding("open files", result, f"at most {files}", remedy)
    else:
        yield Finding("open files", "ok", f"at most {files}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        found = f"{format_bytes(free)} free in {shared}"
        if free < SMALLEST_SHARED_MEMORY:
            remedy = "start the container with more: docker run --shm-size=8g"
            yield Finding("shared memory", "warning", found, remedy)
        else:
            yield Finding("shared memory", "ok", found)


def check_folders() -> Iterator[Finding]:
    folder = home_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{secrets.token_hex(4)}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        remedy = f"set {variable_name('home')} to a folder that you can write"
        yield Finding("home", "problem", f"{folder}: {error.strerror}", remedy)
    else:
        yield Finding("home", "ok", str(folder))


# ---------------------------------------------------------------- other machines, the store


def check_machine(machine: str, ssh: str, python: str) -> Iterator[Finding]:
    if is_loopback(machine):
        yield Finding(machine, "ok", "this machine")
        return
    try:
        own = address_facing(machine)
    except OSError as error:
        yield Finding(machine, "problem", f"unknown: {error.strerror}", "check its name in the machine list")
        return
    options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
    asked = shlex.join([python, "-c", ASKED_OF_MACHINES])
    command = [*shlex.split(ssh), *options, "--", machine, asked]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SSH_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        yield Finding(machine, "problem", f"no ssh client {command[0]!r}", "install one, or pass --ssh")
        return
    except subprocess.TimeoutExpired:
        yield Finding(machine, "problem", f"no answer in {SSH_SECONDS:.0f} s", f"try: ssh {machine} true")
        return
    words = done.stdout.split()
    if done.returncode != 0 or len(words) < 2:
        why = explain_ssh_end(machine, done.returncode, done.stderr or done.stdout)
        yield Finding(machine, "problem", why, f"try: ssh {machine} {asked}")
    elif words[-2] != varuna.__version__:
        found = f"varuna {words[-2]}, but {varuna.__version__} here"
        yield Finding(machine, "problem", found, "install the same version on all machines")
    else:
        yield Finding(machine, "ok", f"varuna {words[-2]}, torch {words[-1]}; it reaches this one at {own}")


def check_store(url: str) -> Iterator[Finding]:
    """Write, read and remove a small file."""
    from varuna.checkpoint.store.store import open_store

    name, data = f"doctor-{secrets.token_hex(4)}", secrets.token_bytes(16)
    try:
        opened = open_store(url)
        opened.replace(name, data)
        same = opened.read(name) == data
        opened.remove(name)
    except (OSError, ValueError, ImportError) as error:
        yield Finding("store", "problem", str(error), "choose a folder or bucket that all machines can write")
        return
    if same:
        yield Finding("store", "ok", f"{url} can be written and read")
    else:
        yield Finding("store", "problem", f"{url} returns other bytes than were written", "use another store")
