"""The command itself: runs all checks and prints their findings."""

import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from varuna.cli.doctor.finding import Finding
from varuna.cli.doctor.network import Reach, check_machines
from varuna.cli.doctor.storage import check_folders, check_store
from varuna.cli.doctor.this_machine import (
    check_devices,
    check_limits,
    check_nccl,
    check_ports,
    check_torch,
    check_versions,
)
from varuna.cli.options import AsJson, exit_2_on_error, printable
from varuna.cli.run import read_file
from varuna.codec import encode
from varuna.morph.machines import read_machines, require_machines

Check = Callable[[], Iterator[Finding]]
HERE: tuple[Check, ...] = (
    check_versions,
    check_torch,
    check_devices,
    check_nccl,
    check_limits,
    check_folders,
    check_ports,
)


def doctor(
    machine_list: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Check the machines of this list, and their network, over ssh."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Check that checkpoints can be written here.")
    ] = None,
    ssh: Annotated[str, typer.Option(help="ssh client and its options.")] = "ssh",
    python: Annotated[str, typer.Option(help="Python on other machines.")] = sys.executable,
    manager_ip: Annotated[
        str, typer.Option(help="Address of this machine for agents. Default: the one on their route.")
    ] = "",
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
    checks: list[Check] = [*HERE, lambda: check_machines(machines, Reach(ssh, python, manager_ip))]
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
