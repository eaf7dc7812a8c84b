"""Messages that start a generation, prepare its joiners, or order workers into it in place."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from varuna.codec import UNDECODABLE
from varuna.files import make_private_folder, write_atomic
from varuna.morph import commands
from varuna.morph.protocol.messages import MorphWorkers, StartWorkers
from varuna.morph.state import Generation
from varuna.types import JobSpec, MachineWorkers

GenerationCommand = commands.Launch | commands.Prepare | commands.Morph
MACHINES = "machines.json"
"""The ranks of each machine, in the folder of a generation."""


def generation_messages(
    command: GenerationCommand, job: JobSpec, environment: Mapping[str, str]
) -> dict[str, StartWorkers | MorphWorkers]:
    """Return the message for each machine. `environment` adds to the planner's variables."""
    generation = command.generation
    ranks_of = dict(zip(generation.machines, generation.ranks, strict=True))

    def workers(machine: str) -> MachineWorkers:
        return MachineWorkers(
            job=job,
            layout=generation.layout,
            ranks=ranks_of.get(machine, ()),
            master_addr=generation.master_addr,
            master_port=generation.master_port,
            resume_step=generation.resume_step,
            environment={**generation.environment, **environment},
        )

    if isinstance(command, commands.Morph):
        return {
            machine: MorphWorkers(
                generation=generation.number,
                workers=workers(machine),
                last_layout=command.last.layout,
                previous=command.previous,
                leaving=command.leaving,
                lost=command.lost,
                why=command.why,
            )
            for machine in dict.fromkeys((*command.last.machines, *generation.machines))
        }
    joins = isinstance(command, commands.Prepare)
    machines = command.joiners if isinstance(command, commands.Prepare) else generation.machines
    return {machine: StartWorkers(generation.number, workers(machine), joins) for machine in machines}


def write_machines(log_dir: Path, generation: Generation) -> None:
    """Write which machine has which ranks, for those who look for a rank's files later. Raise OSError."""
    folder = log_dir / f"generation_{generation.number}"
    make_private_folder(folder)
    ranks = msgspec.json.encode(dict(zip(generation.machines, generation.ranks, strict=True))).decode()
    write_atomic(folder / MACHINES, f"{ranks}\n", fsync=False, private=True)


def read_machines(log_dir: Path, number: int) -> dict[int, str]:
    """Return the machine of each rank of a generation; empty if it is not known."""
    try:
        data = (log_dir / f"generation_{number}" / MACHINES).read_bytes()
        ranks = msgspec.json.decode(data, type=dict[str, list[int]])
    except (OSError, *UNDECODABLE):
        return {}
    return {rank: machine for machine, found in ranks.items() for rank in found}


def describe_generation(command: commands.Launch | commands.Morph) -> str:
    """Return the line of the event log: "2: 2 stages x 1 replica, ... on a, b, from step 10 (b joins)"."""
    generation = command.generation
    resumed = "" if generation.resume_step is None else f", from step {generation.resume_step}"
    how = ", in place" if isinstance(command, commands.Morph) else resumed
    machines = ", ".join(generation.machines)
    return f"{generation.number}: {generation.layout} on {machines}{how} ({command.why})"


def name_unused_devices(generation: Generation, usable: tuple[str, ...], *, devices_per_machine: int) -> str:
    """Return the idle devices: "1 of host-a, all of host-b"."""
    places = zip(generation.machines, generation.ranks, strict=True)
    idle = {machine: devices_per_machine - len(ranks) for machine, ranks in places}
    partly = [f"{count} of {machine}" for machine, count in idle.items() if count]
    spares = [f"all of {name}" for name in usable if name not in generation.machines]
    return ", ".join([*partly, *spares])
