"""The command `varuna`. Only commands that use tensors import torch, so the others start fast."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

import varuna
from varuna.cli import chaos, checkpoint, jobs, ledger, plan, profile, run, verify
from varuna.cli.doctor.command import doctor
from varuna.cli.options import add_command, exit_2_on_error, new_app, run_app
from varuna.cli.status import page, trace
from varuna.demo.compare import run_demo
from varuna.environment import RUN_PREFIX

app = new_app(no_args_is_help=True, help="Train PyTorch models on many devices.")
for command in (profile.profile, verify.verify, plan.plan, plan.explain, plan.show, plan.simulate):
    add_command(app, exit_2_on_error()(command))
for command in (chaos.chaos, ledger.ledger, page.page, trace.trace):
    add_command(app, exit_2_on_error()(command))
add_command(app, doctor)
add_command(app, run.run, ends_with_script=True, variables=RUN_PREFIX)
for command in (jobs.status, jobs.stop, jobs.drain, jobs.logs):
    add_command(app, command)
app.add_typer(checkpoint.app, name="checkpoint")


@app.command()
def demo(steps: Annotated[int, typer.Option(min=1, help="Steps of both runs.")] = 60) -> None:
    """Train a small GPT over 4 processes on this machine and compare it with one plain process."""
    raise typer.Exit(run_demo(steps))


@app.callback(invoke_without_command=True)
def options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        try:
            torch_version = version("torch")
        except PackageNotFoundError:
            torch_version = "not installed"
        typer.echo(f"varuna {varuna.__version__}\ntorch {torch_version}")
        raise typer.Exit


def main() -> None:
    run_app(app, "varuna")
