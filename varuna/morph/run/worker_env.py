"""Ranks of each machine, and the flags and environment variables of each worker."""

import ast
from itertools import accumulate, pairwise

from varuna.environment import VarunaEnvironment
from varuna.morph.protocol.messages import MorphWorkers
from varuna.morph.run.script_flags import MAP_FLAG
from varuna.types import Layout, MachineWorkers, MorphOrder, format_stage_map

WORKER_DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Environment variables of workers, unless they are set already."""
WORKER_FLAGS = (
    "--rank",
    "--local_rank",
    MAP_FLAG,
    "--chunk_size",
    "--batch-size",
    "--resume_step",
)
"""Flags that a worker's script may accept; they come before its own arguments, in this order."""


def ranks_of_machines(
    layout: Layout, num_machines: int, *, devices_per_machine: int
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each machine; ranks number the used devices of all machines in order."""
    used = [devices_per_machine] * num_machines
    for device in layout.idle:
        if device < num_machines * devices_per_machine:
            used[device // devices_per_machine] -= 1
    ranks = tuple(range(layout.num_ranks))
    return tuple([ranks[first:end] for first, end in pairwise(accumulate(used, initial=0))])


def ranks_of_machine(layout: Layout, machine: int, *, devices_per_machine: int) -> tuple[int, ...]:
    """Return the ranks of one machine."""
    return ranks_of_machines(layout, machine + 1, devices_per_machine=devices_per_machine)[machine]


def name_idle_devices(layout: Layout, *, devices_per_machine: int) -> str:
    """Return the idle devices by machine: "machine 0: device 3"."""
    machines: dict[int, list[int]] = {}
    for device in layout.idle:
        machines.setdefault(device // devices_per_machine, []).append(device % devices_per_machine)
    return "; ".join(
        f"machine {machine}: {'device' if len(devices) == 1 else 'devices'} {', '.join(map(str, devices))}"
        for machine, devices in machines.items()
    )


def accepted_flags(source: str) -> frozenset[str]:
    """Return the launch flags in a script's source, or none if it lacks `--stage_to_rank_map`.

    Only that flag is specific to Varuna: a script may use `--rank` or `--batch-size` for itself. A script
    that uses argparse gets all flags that its parser takes, whatever its source says (`offer_flags`).
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()  # the worker will report the error
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return frozenset(WORKER_FLAGS) & constants if MAP_FLAG in constants else frozenset()


def launch_flags(workers: MachineWorkers, local_rank: int) -> dict[str, str]:
    """Return the launch flags of one worker with their values."""
    layout, rank = workers.layout, workers.ranks[local_rank]
    values: dict[str, object] = {
        "--rank": rank,
        "--local_rank": local_rank,
        MAP_FLAG: format_stage_map(layout.stage_map),
        "--chunk_size": layout.microbatch_size,
        "--batch-size": layout.replica_batch(rank),
        "--resume_step": workers.resume_step,
    }
    return {flag: str(value) for flag, value in values.items() if value is not None}


def worker_arguments(workers: MachineWorkers, local_rank: int) -> tuple[str, ...]:
    """Return the arguments of the script in one worker: the launch flags that it accepts, then its own."""
    job, flags = workers.job, launch_flags(workers, local_rank)
    accepted = (f"{flag}={value}" for flag, value in flags.items() if flag in job.worker_flags)
    return (*accepted, *job.arguments)


def forced(force: bool) -> dict[str, str]:
    """Return the variable that makes workers take over a claimed store, or none."""
    return VarunaEnvironment(force_claim="1" if force else None).write()


def worker_environment(workers: MachineWorkers, local_rank: int) -> dict[str, str]:
    """Return the variables of one worker: torch's, which `init_process_group()` reads, and ours."""
    layout, rank = workers.layout, workers.ranks[local_rank]
    torch_values = {
        "MASTER_ADDR": workers.master_addr,
        "MASTER_PORT": str(workers.master_port),
        "WORLD_SIZE": str(layout.num_ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(workers.ranks)),
    }
    ours = VarunaEnvironment(
        stage_to_rank_map=format_stage_map(layout.stage_map),
        batch_size=layout.batch_size,
        replica_batch_size=layout.replica_batch(rank),
        chunk_size=layout.microbatch_size,
        resume_step=workers.resume_step,
        log_dir=workers.job.log_dir,
    )
    return {**workers.environment, **torch_values, **ours.write()}


def make_orders(morph: MorphWorkers, last_ranks: tuple[int, ...], *, joins: bool) -> dict[int, MorphOrder]:
    """Return the order of each worker of a machine, by its present rank: that of a joiner is tentative.

    The first workers that are left stay. Each keeps its device, and so its LOCAL_RANK.
    """
    orders = {}
    left = [old for old in last_ranks if joins or old not in morph.lost]
    for place, old in enumerate(left):
        stays = place < len(morph.workers.ranks)
        rank = morph.workers.ranks[place] if stays else None
        environment: dict[str, str] = {}
        if stays:
            ours = VarunaEnvironment(generation=morph.generation).write()
            environment = {**worker_environment(morph.workers, place), **ours}
            del environment["LOCAL_RANK"]
        orders[old] = MorphOrder(
            generation=morph.generation,
            layout=morph.workers.layout,
            last_layout=morph.last_layout,
            rank=rank,
            previous=morph.previous,
            leaving=morph.leaving,
            lost=morph.lost,
            old_rank=None if joins else old,
            master_addr=morph.workers.master_addr,
            master_port=morph.workers.master_port,
            environment=environment,
            why=morph.why,
        )
        assert rank is None or morph.previous[rank] == (None if joins else old)
    return orders
