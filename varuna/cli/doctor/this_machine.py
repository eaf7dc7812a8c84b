"""Checks of this machine: torch, devices, groups of processes, limits and ports."""

import importlib.metadata
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import varuna
from varuna.cli.doctor.finding import Finding, Result
from varuna.cli.doctor.gpu_ranks import MODULE as GPU_PROGRAM
from varuna.morph.run.job_folder import listen
from varuna.page.serve import DEFAULT_PORT, open_listener
from varuna.units import format_bytes

OLDEST_TORCH = (2, 11)
FEWEST_FILES = 4096
SMALLEST_SHARED_MEMORY = 1 << 30
GROUP_SECONDS = 120.0
"""Time limit for a group of processes to form."""
GLOO_PROGRAM = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.barrier()
"""


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
    yield from check_gloo()


def check_gloo() -> Iterator[Finding]:
    """Form a group of one rank over the network, as every job does."""
    failure = failure_of(["-c", GLOO_PROGRAM])
    if failure is None:
        yield Finding("gloo", "ok", "a process group forms on this machine")
    else:
        remedy = (
            "name the interface of the job (GLOO_SOCKET_IFNAME=eth0), and check that this machine's own "
            "name has an address: getent hosts $(hostname)"
        )
        yield Finding("gloo", "problem", f"no process group forms: {failure}", remedy)


def failure_of(arguments: Sequence[str]) -> str | None:
    """Run Python with these arguments. Return the last line of its error, or None if there is none."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # its ranks end with it
        )
        try:
            status = process.wait(GROUP_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it hangs ({GROUP_SECONDS:.0f} s)"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    return None if status == 0 else (lines or [f"exit status {status}"])[-1]


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


def check_nccl() -> Iterator[Finding]:
    """Form an NCCL group over all GPUs, and share memory between two processes on the first one."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError):
        return
    count = torch.cuda.device_count()
    if not count:
        yield Finding("NCCL", "ok", "not applicable: no GPU")
        return
    if not dist.is_available() or not dist.is_nccl_available():
        yield Finding("NCCL", "warning", "this torch has none", "replicas reduce over gloo, which is slower")
    else:
        nccl: Any = torch.cuda.nccl
        version = ".".join(map(str, nccl.version()))
        ranks = "1 rank" if count == 1 else f"{count} ranks"
        failure = failure_of(["-m", GPU_PROGRAM, "nccl", str(count)])
        if failure is None:
            yield Finding("NCCL", "ok", f"{version}; a group of {ranks} forms on this machine")
        else:
            remedy = (
                "set NCCL_DEBUG=INFO in the env file; name the interface of the job: NCCL_SOCKET_IFNAME=eth0"
            )
            yield Finding("NCCL", "problem", f"{version}; no group of {ranks} forms: {failure}", remedy)
    failure = failure_of(["-m", GPU_PROGRAM, "share"])
    if failure is None:
        yield Finding("CUDA IPC", "ok", "two processes share GPU memory")
    else:
        remedy = (
            "stages of one machine send over sockets, which is slower; in containers: docker run --ipc=host"
        )
        yield Finding("CUDA IPC", "warning", f"processes cannot share GPU memory: {failure}", remedy)


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


def check_ports() -> Iterator[Finding]:
    """Listen as the manager and the page of a job on this machine would."""
    try:
        listen("127.0.0.1", 0).close()
    except ValueError as error:
        yield Finding("manager's port", "problem", str(error), "allow this user to listen on TCP ports")
    else:
        yield Finding("manager's port", "ok", "a port of 127.0.0.1 can be opened")
    try:
        open_listener(DEFAULT_PORT).close()
    except ValueError:
        yield Finding("page", "ok", f"port {DEFAULT_PORT} is taken: `varuna run --page` takes another one")
    else:
        yield Finding("page", "ok", f"port {DEFAULT_PORT} is free")
