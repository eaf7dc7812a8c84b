"""Name, memory and choice of the device that a rank computes on."""

import os
import platform
from collections.abc import Callable

import torch


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu ({_processor()}, {threads} thread{'s' if threads > 1 else ''})"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def device_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, _container_limit_bytes() or physical)


def device_facts(device: torch.device) -> Callable[[], dict[str, object]] | None:
    """Return a function that measures peak and size of a GPU's memory; None for a CPU."""
    if device.type != "cuda":
        return None
    fixed = {"memory_limit": device_memory_bytes(device), "device": device_name(device)}
    return lambda: {"memory_bytes": torch.cuda.max_memory_allocated(device), **fixed}


def _container_limit_bytes() -> int | None:
    """Return the memory limit of the container, if it has one."""
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            text = file.read().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a CPU, where the kernel kills a process that takes too much; else None."""
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def ran_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def find_device(device: int | str | torch.device, local_rank: int, rank: int) -> torch.device:
    """Return the device of this rank. A missing GPU is an error; no other device takes its place."""
    if isinstance(device, int):
        if not torch.cuda.is_available():
            return torch.device("cpu")
        local_rank = local_rank if local_rank >= 0 else int(os.environ.get("LOCAL_RANK", -1))
        return choose_gpu(device, local_rank, rank, count=torch.cuda.device_count())
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")  # tensors on "cpu:0" say that they are on "cpu"
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={str(device)!r} names a GPU, but torch {torch.__version__} finds none "
            "(check nvidia-smi and CUDA_VISIBLE_DEVICES, or pass device='cpu')"
        )
    if found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return choose_gpu(found.index, -1, rank, count=torch.cuda.device_count())


def choose_gpu(index: int, local_rank: int, rank: int, *, count: int) -> torch.device:
    """Return GPU `index`; if it is negative, the GPU with the worker's local rank."""
    if index >= count:
        raise ValueError(
            f"rank {rank} cannot use GPU {index}: this machine has {count}, numbered 0 to {count - 1}"
        )
    if index < 0 and local_rank >= count:
        raise ValueError(
            f"rank {rank} is worker {local_rank} of its machine, which has {count} "
            f"GPU{'s' if count > 1 else ''}: each worker needs one (start {count} on it, or name the "
            "GPU that they share: device='cuda:0')"
        )
    return torch.device("cuda", index if index >= 0 else local_rank if local_rank >= 0 else rank % count)
