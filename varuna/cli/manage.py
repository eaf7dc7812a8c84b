"""Starts or resumes the manager of a job from its folder."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from varuna.checkpoint.load import newest
from varuna.checkpoint.store.store import open_store, retrying
from varuna.cli.launch import Job, say
from varuna.execute.comm.address import address_facing
from varuna.morph.clock import WakingClock
from varuna.morph.journal import Begun, Journal, Over, StoreSeen, read, restore
from varuna.morph.machines import is_loopback
from varuna.morph.protocol.orders import Starter
from varuna.morph.run.job_folder import Contact, JobFolder, listen
from varuna.morph.run.manager import ManagedJob, Manager, Planner
from varuna.morph.starters.local import LocalStarter
from varuna.morph.starters.ssh import SshStarter
from varuna.morph.state import JobState, Settings, Verdict

StarterName = Literal["ssh", "slurm", "ray"]


STORE_SECONDS = 30.0
"""How long a store that does not answer is asked for the newest checkpoint."""


def lead(
    job: Job,
    *,
    machine_list: str,
    machines: tuple[str, ...],
    planner: Planner,
    folder: JobFolder,
    resume: bool,
    manager_ip: str | None,
    leaves_slow: bool,
    save_every_seconds: float | None,
    starter: StarterName,
    starter_options: Sequence[str],
    ssh: Sequence[str],
    python: str,
    cloud: str,
    cloud_url: str,
    settings: Settings,
) -> int:
    """Leads the job to its end; the exit status says how that was."""
    lock = folder.lock()
    try:
        address_for = addresses(machines, manager_ip)
        if starter != "ssh":
            # What they start may be queued for days; where it runs and finds no manager, it ends.
            settings = msgspec.structs.replace(settings, start_seconds=1e9)
        records = read(folder.journal)
        before = folder.read_contact()
        goes_on = resume and bool(records) and not any(isinstance(record, Over) for record in records)
        listener = listen(address_for(machines[0]), before.port if before is not None else 0)
        name = (
            before.job
            if goes_on and before is not None
            else f"{Path(job.script).stem}-{secrets.token_hex(4)}"
        )
        contact = Contact(
            job=name,
            pid=os.getpid(),
            address=listener.getsockname()[0],
            port=listener.getsockname()[1],
            secret=before.secret if goes_on and before is not None else secrets.token_hex(32),
            log_dir=before.log_dir if goes_on and before is not None else job.log_dir,
        )
        folder.write_contact(contact)
        journal = Journal(folder.journal)
        clock = WakingClock(time.monotonic)
        now = clock.now()
        if goes_on:
            say(f"job {name} is taken up again")
            state = restore(records, settings=settings, now=now)
        else:
            journal.write(Begun(name, contact.port, contact.log_dir))
            state = JobState(settings=settings, since=now, changed_at=now, resume_step=job.resume_step)
            stores = [record.store for record in records if isinstance(record, StoreSeen)]
            if resume and stores:
                journal.write(StoreSeen(stores[-1]))
                state = msgspec.structs.replace(state, store=stores[-1])
        managed = ManagedJob(
            name=name,
            script=job.script,
            arguments=job.arguments,
            flags=job.flags,
            code_dir=job.code_dir,
            log_dir=contact.log_dir,
            devices_per_machine=job.devices_per_machine,
            environment=job.environment,
            machine_list=machine_list,
            port=contact.port,
            secret=contact.secret,
            slow_file=str(Path("slow_machines.out").absolute()),
            leaves_slow=leaves_slow,
            save_every_seconds=save_every_seconds,
            cloud=cloud,
            cloud_url=cloud_url,
        )
        elsewhere = make_starter(starter, starter_options, managed, ssh=ssh, python=python)
        here = LocalStarter(Path(managed.log_dir))

        async def run() -> Verdict:
            manager = Manager(
                managed,
                state,
                planner=planner,
                starter_of=lambda machine: here if is_loopback(machine) else elsewhere,
                newest=newest_step,
                address_for=address_for,
                journal=journal,
                clock=clock,
                say=say,
            )
            return await manager.lead(listener)

        verdict = asyncio.run(run())
        return tell(verdict, contact.log_dir)
    finally:
        os.close(lock)


def tell(verdict: Verdict, log_dir: str) -> int:
    failed = verdict.how == "failed"
    ending = "all workers are ended; logs in" if failed else "logs in"
    say(f"{verdict.how}: {verdict.reason}{chr(10) * 2 if failed else '; '}{ending} {log_dir}", error=failed)
    return verdict.exit_code


def make_starter(
    name: StarterName, options: Sequence[str], job: ManagedJob, *, ssh: Sequence[str], python: str
) -> Starter:
    """For machines that are not this one."""
    logs = Path(job.log_dir)
    if name == "slurm":
        from varuna.morph.starters.slurm import SlurmStarter

        return SlurmStarter(shared_folder=logs, folder=job.code_dir, python=python, options=options)
    if name == "ray":
        from varuna.morph.starters.ray import RayStarter

        return RayStarter(folder=job.code_dir, python=python)
    return SshStarter(log_folder=logs, folder=job.code_dir, python=python, ssh=ssh)


def addresses(machines: tuple[str, ...], manager_ip: str | None) -> Callable[[str], str]:
    """The address of this machine that another one dials; sends nothing."""

    @cache
    def facing(machine: str) -> str:
        if manager_ip:
            return manager_ip
        if not is_loopback(machine):
            return address_towards(machine)
        # Beside real machines, this one must be known by an address that those can reach.
        others = [other for other in machines if not is_loopback(other)]
        return address_towards(others[0]) if others else "127.0.0.1"

    return facing


def address_towards(machine: str) -> str:
    try:
        return address_facing(machine)
    except OSError:  # a name that only a scheduler or ssh knows: the address that faces the world
        try:
            return address_facing("192.0.2.1")
        except OSError as error:
            raise ValueError(
                f"no address of this machine faces {machine} ({error.strerror}; name one: --manager_ip)"
            ) from None


def newest_step(store: str) -> int | None:
    """And there will be no newer one: a machine that was cut off may not know yet that the job goes on."""
    with suppress(OSError):  # a manager that may only read the store must trust in the machines' own end
        open_store(store).disown()
    return newest(retrying(open_store(store), seconds=STORE_SECONDS, on_wait=lambda text: say(text)))
