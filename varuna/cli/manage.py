"""Starts the manager of a job, or resumes it from the job's folder."""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import msgspec

from varuna.addresses import address_facing, is_loopback
from varuna.checkpoint.load import newest_whole, none_left
from varuna.checkpoint.store.store import open_store, retrying
from varuna.cli.options import say
from varuna.cli.status.screen import open_screen
from varuna.cli.status.viewers import ViewerOptions, observing
from varuna.morph.clock import SuspendAwareClock
from varuna.morph.journal import (
    JobBegun,
    JobOver,
    Journal,
    JournalRecord,
    StoreSeen,
    last_logged_number,
    read_journal,
    restore_state,
)
from varuna.morph.protocol.orders import Starter
from varuna.morph.run.job_folder import JobFolder, ManagerContact, listen
from varuna.morph.run.manager import Manager, Planner
from varuna.morph.starters.local import LocalStarter
from varuna.morph.starters.ssh import SshStarter
from varuna.morph.state import JobState, JobVerdict, ManagerSettings
from varuna.processes import raise_file_limit
from varuna.secure.credential import make_credential
from varuna.types import JobSpec

STORE_SECONDS = 30.0
"""Time limit for finding the newest checkpoint in a store that does not answer."""
MAX_FILES = 2**16
"""Each machine has a connection. The usual limit of 1,024 files is too low for large jobs."""
QUEUE_SECONDS = 1e9
"""Start timeout of agents that a scheduler may queue for days. An agent that finds no manager ends."""


def manage(
    job: JobSpec,
    *,
    machines: tuple[str, ...],
    planner: Planner,
    folder: JobFolder,
    resume: bool,
    viewers: ViewerOptions,
) -> int:
    """Manage the job until it ends. Return its exit status."""
    raise_file_limit(MAX_FILES)
    lock = folder.lock()
    try:
        found = read_journal(folder.journal)
        records = found.records
        if found.num_damaged:
            say(f"{folder.journal}: {found.num_damaged} damaged lines are skipped")
        attach = resume and bool(records) and not any(isinstance(record, JobOver) for record in records)
        address_for = addresses(machines, job.manager_ip)
        listener, contact = open_contact(job, folder, address_for(machines[0]), attach=attach)
        job = msgspec.structs.replace(job, log_dir=contact.log_dir)
        clock = SuspendAwareClock(time.monotonic)
        state, records = first_state(job, contact, records, attach=attach, resume=resume, now=clock.now())
        journal = Journal(folder.journal, records)
        if journal.problem and not attach:
            folder.journal.unlink(missing_ok=True)  # it is another job's
        here, elsewhere = LocalStarter(Path(job.log_dir)), make_starter(job)

        async def run() -> JobVerdict:
            screen = open_screen(viewers.status)
            manager = Manager(
                job,
                contact,
                state,
                planner=planner,
                starter_of=lambda machine: here if is_loopback(machine) else elsewhere,
                newest=partial(newest_step, launch=contact.job),
                address_for=address_for,
                journal=journal,
                clock=clock,
                say=screen.say,
                show_output=lambda output: screen.worker_output(
                    output.rank, output.text, is_stderr=output.is_stderr
                ),
            )
            async with observing(manager, screen, viewers):
                return await manager.run(listener)

        verdict = asyncio.run(run())
    finally:
        os.close(lock)
    failed = verdict.how == "failed"
    ending = "\n\nall workers have ended; logs in" if failed else "; logs in"
    say(f"{verdict.how}: {verdict.reason}{ending} {job.log_dir}", error=failed)
    return verdict.exit_code


def first_state(
    job: JobSpec,
    contact: ManagerContact,
    records: tuple[JournalRecord, ...],
    *,
    attach: bool,
    resume: bool,
    now: float,
) -> tuple[JobState, tuple[JournalRecord, ...]]:
    """Return the state of a new or resumed manager, and the records that its journal begins with."""
    settings = settings_of(job)
    if attach:
        say(f"job {contact.job} is resumed")
        last_number = last_logged_number(Path(job.log_dir))
        return restore_state(records, settings=settings, now=now, last_number=last_number), records
    state = JobState(settings=settings, since=now, changed_at=now, resume_step=job.resume_step)
    stores = [record for record in records if isinstance(record, StoreSeen)] if resume else []
    if stores:  # continue from the last one
        state = msgspec.structs.replace(state, store=stores[-1].store)
    return state, (JobBegun(contact.job, contact.port, contact.log_dir), *stores)


def open_contact(
    job: JobSpec, folder: JobFolder, address: str, *, attach: bool
) -> tuple[socket.socket, ManagerContact]:
    """Listen, and write the contact file. If attaching, keep the job's name, credential and logs."""
    try:
        before = folder.read_contact()
    except ValueError:
        if attach:
            raise
        before = None  # a new job does not need what an earlier version has left
    listener = listen(address, before.port if before is not None else 0)
    found, port = listener.getsockname()[:2]
    if attach and before is not None:
        contact = msgspec.structs.replace(
            before, pid=os.getpid(), address=found, port=port, host=socket.gethostname()
        )
    else:
        name = f"{Path(job.script).stem}-{secrets.token_hex(4)}"
        contact = ManagerContact(
            job=name,
            pid=os.getpid(),
            address=found,
            port=port,
            credential=make_credential(name),
            log_dir=job.log_dir,
            host=socket.gethostname(),
        )
    folder.write_contact(contact)
    return listener, contact


def settings_of(job: JobSpec) -> ManagerSettings:
    settings = ManagerSettings(morphs=job.morphing, hot=job.hot, greedy=job.greedy)
    if job.hang_seconds is not None:
        settings = msgspec.structs.replace(settings, hang_seconds=job.hang_seconds)
    if job.starter != "ssh":
        settings = msgspec.structs.replace(settings, start_seconds=QUEUE_SECONDS)
    return settings


def make_starter(job: JobSpec) -> Starter:
    """Return the starter of agents on machines other than this one."""
    logs = Path(job.log_dir)
    if job.starter == "slurm":
        from varuna.morph.starters.slurm import SlurmStarter

        return SlurmStarter(
            shared_folder=logs, folder=job.code_dir, python=job.python, options=job.starter_options
        )
    if job.starter == "ray":
        from varuna.morph.starters.ray import RayStarter

        return RayStarter(folder=job.code_dir, python=job.python)
    return SshStarter(log_folder=logs, folder=job.code_dir, python=job.python, ssh=job.ssh)


def addresses(machines: tuple[str, ...], manager_ip: str) -> Callable[[str], str]:
    """Return a function: the address of this machine that a given machine connects to."""

    @cache
    def facing(machine: str) -> str:
        if manager_ip:
            return manager_ip
        if not is_loopback(machine):
            return address_towards(machine)
        # If the job also has remote machines, local workers must use an address that those can reach.
        others = [other for other in machines if not is_loopback(other)]
        return address_towards(others[0]) if others else "127.0.0.1"

    return facing


def address_towards(machine: str) -> str:
    """Return the address of this machine on the route to another. Send nothing."""
    try:
        return address_facing(machine)
    except OSError:  # only a scheduler or ssh knows this name: take the address of the default route
        try:
            return address_facing("192.0.2.1")
        except OSError as error:
            raise ValueError(
                f"this machine has no address on the route to {machine} ({error.strerror}); "
                "name one with --manager-ip"
            ) from None


def newest_step(store: str, *, launch: str) -> int | None:
    """Return the step of the newest complete checkpoint, and take the store from an earlier generation.

    So a machine that lost its connection, and does not know that the job went on, cannot add a newer one.
    """
    with suppress(OSError):  # a manager with read access only relies on that machine to end its workers
        open_store(store).disown(launch)
    opened = retrying(open_store(store), seconds=STORE_SECONDS, on_wait=lambda text: say(text))
    manifest, newer = newest_whole(opened)
    if manifest is None and any(one.broken for one in newer):
        raise none_left(opened, newer)
    return None if manifest is None else manifest.facts.step
