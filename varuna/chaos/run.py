"""Runs a script as a managed job under faults, then undisturbed in one process, and reports both."""

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from varuna.chaos.faults.kinds import FAULTS
from varuna.chaos.hosts.lab import Lab
from varuna.chaos.injector import LEFT_OUT, FaultRequest, FaultSkipped, Injector, pause
from varuna.chaos.job import PATIENCE_SECONDS, ChaosJob, JobStuck
from varuna.chaos.leftovers import JobWatcher, Leftovers
from varuna.chaos.machines import ChaosMachine, LoopbackMachine
from varuna.chaos.market import MarketPlayer, has_faults, names_of
from varuna.chaos.report import ChaosReport, Outcome
from varuna.chaos.script import ScheduledFault
from varuna.chaos.undisturbed import LossComparison, compare_losses, run_plainly
from varuna.chaos.workspace import Workspace
from varuna.morph.ledger_file import NAME as LEDGER
from varuna.morph.ledger_file import read_ledger
from varuna.observe.ledger import LedgerReport, report_ledger
from varuna.secure.framing import FramingError
from varuna.simulate.traces import MarketTrace

FIRST_STEPS = 3
"""Steps before the first fault."""
HANG_MINUTES = 3.0
"""A random run with less time has no fault that takes a minute."""

Progress = Callable[[int, int, str], None]


class ChaosRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a chaos run depends on."""

    script: tuple[str, ...]  # with its arguments
    code_dir: Path
    batch_size: int
    chunk_size: int
    stages: int
    per_machine: int
    machines: int
    hosts: bool
    seed: int
    seconds: float  # of random faults
    faults: tuple[ScheduledFault, ...] = ()  # in place of random ones
    trace: MarketTrace | None = None  # in place of faults
    notice_seconds: float = 0.0  # before each removal of the trace
    tolerance: float = 1e-3
    patience_seconds: float = PATIENCE_SECONDS
    run_options: tuple[str, ...] = ()  # more options of `varuna run`
    out: Path | None = None  # folder that gets logs, ledger and losses


class Played(msgspec.Struct):
    """The end of the job, as far as its manager knows it."""

    outcome: Outcome = "stopped"
    problem: str = ""
    ledger: LedgerReport | None = None


class ChaosRun:
    """One run: its folder, machines and job. Close it in any case."""

    def __init__(
        self,
        request: ChaosRequest,
        environment: Mapping[str, str],
        *,
        say: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._request = request
        self._say = say
        self._progress = progress
        self._stack = ExitStack()
        self._space = Workspace(request.code_dir, environment)
        self._stack.callback(self._space.remove)
        self._started = 0.0

    def close(self) -> None:
        """End all processes and remove all files of the run."""
        self._stack.close()

    def run(self) -> ChaosReport:
        request, space = self._request, self._space
        watcher = JobWatcher(space.folder, space.folder / "tmp")
        self._stack.callback(watcher.remove)
        injector, by_name = self._start()
        job = injector.job
        played = self._play(injector, by_name)
        job.close()
        injector.count_redone()
        seconds = time.monotonic() - self._started
        if not job.steps:
            raise ValueError(
                "the job has trained no step (its script must wrap the model with Varuna, and train by "
                f"model.step); its last output:\n{_tail(job.lines)}"
            )
        left = watcher.find()
        watcher.remove()
        losses = self._compare(job)
        if request.out is not None:
            space.keep(request.out)
        return self._report(injector, played, losses, left, seconds)

    # ------------------------------------------------------------ the job

    def _start(self) -> tuple[Injector, dict[str, ChaosMachine]]:
        """Start the job; return it with the machines of the trace by name."""
        request, space = self._request, self._space
        options = ["--machine_list", str(space.machine_list), "--gpus_per_node", str(request.per_machine)]
        jobs: list[ChaosJob] = []
        count = request.machines
        names = names_of(request.trace) if request.trace is not None else []
        if request.trace is not None:
            count = len(names)
        machines: list[ChaosMachine] = []
        if request.hosts:
            lab = self._stack.enter_context(Lab(count, space.variables("job")))
            machines += lab.hosts
            options += ["--ssh", shlex.join(lab.ssh)]
        else:
            machines += [
                LoopbackMachine(n, lambda name: _agent_pid(jobs[0], name)) for n in range(1, count + 1)
            ]
        by_name = dict(zip(names, machines, strict=False))
        first = request.trace.changes[0].added if request.trace is not None else ()
        listed = [by_name[name] for name in first] if first else machines
        for machine in machines:
            if request.hosts and machine not in listed:  # it boots when the trace adds it
                machine.kill()
        space.machine_list.write_text("".join(f"{machine.address}\n" for machine in listed))
        self._started = time.monotonic()
        job = ChaosJob(
            space.folder / "job",
            command=[
                *[*options, "--batch_size", str(request.batch_size), "--chunk_size", str(request.chunk_size)],
                *["--nstages", str(request.stages), "--code_dir", str(space.folder / "job")],
                *["--log_dir", str(space.folder / "logs"), *request.run_options, *request.script],
            ],
            environment=space.environment("job"),
            home=space.folder / "home",
            losses=space.folder / "losses",
            patience_seconds=request.patience_seconds,
        )
        jobs.append(self._stack.enter_context(job))
        fewest = -(-request.stages // request.per_machine)
        injector = Injector(
            job,
            machines,
            machine_list=space.machine_list,
            seed=request.seed,
            stages=fewest,
            batch_size=request.batch_size,
        )
        injector.listing.off = [machine for machine in machines if machine not in listed]
        return injector, by_name

    def _play(self, injector: Injector, by_name: dict[str, ChaosMachine]) -> Played:
        """Inject all faults, and end the job."""
        request, job, played = self._request, injector.job, Played()
        player: MarketPlayer | None = None
        if request.trace is not None:
            player = MarketPlayer(injector, request.trace, by_name, notice_seconds=request.notice_seconds)
        try:
            if player is not None:
                self._play_trace(player)
            else:
                job.wait_for_generation(0)
                job.wait_for_steps(FIRST_STEPS)
                injector.start_clock()
                for scheduled in self._schedule(injector):
                    self._inject(injector, scheduled)
                injector.listing.add(*injector.listing.off)
                job.wait_for_steps(1)
            played.ledger = status.ledger if (status := job.answering()) is not None else None
            try:
                job.request("stop", why="the time of `varuna chaos` is over")
            except (OSError, FramingError, ValueError):  # it ends by itself, so its manager is gone
                played.outcome = "finished"
            code = job.wait_for_ended()
            if code:
                played.outcome, played.problem = "failed", _tail(job.lines)
        except JobStuck as error:
            job.read_output()
            if job.process.poll() == 0:
                played.outcome = "finished"
            else:
                played.outcome = "stuck" if job.process.poll() is None else "failed"
                played.problem = f"{error}\n{_tail(job.lines)}"
        played.ledger = played.ledger or self._written_ledger()
        if player is not None and played.ledger is not None:
            player.write_played(self._space.folder / "played.csv", begun_at=played.ledger.begun_at)
        return played

    def _written_ledger(self) -> LedgerReport | None:
        """Return the ledger that the manager has written: it does not answer any more."""
        for path in (self._space.folder / "logs").glob(f"*/{LEDGER}"):
            with suppress(OSError, ValueError):
                return report_ledger(read_ledger(path))
        return None

    def _play_trace(self, player: MarketPlayer) -> None:
        def show(now: float, end: float) -> None:
            self._progress(int(now), int(end), "playing the trace")

        if not player.play(started=self._started, on_progress=show):
            raise JobStuck("the manager ended")

    def _schedule(self, injector: Injector) -> Iterator[ScheduledFault]:
        """Yield the faults, each when the last one is over."""
        request = self._request
        if not request.faults:
            yield from random_faults(injector, seconds=request.seconds, hosts=request.hosts)
            return
        for number, scheduled in enumerate(request.faults):
            self._progress(number, len(request.faults), scheduled.request.kind)
            yield scheduled

    def _inject(self, injector: Injector, scheduled: ScheduledFault) -> None:
        if scheduled.at is not None:
            while injector.now() < scheduled.at:
                injector.job.read_all()
                pause(0.02)
        kind = scheduled.request.kind
        if not self._request.faults:
            self._progress(int(injector.now()), int(self._request.seconds), kind)
        try:
            done = injector.do(scheduled.request, FAULTS[kind].inject)
        except (FaultSkipped, FramingError, OSError, ValueError, IndexError) as error:
            # Its process or machine went away before the fault, or the manager does not answer.
            done = injector.history[-1]
            done.what = f"{LEFT_OUT}{error}"
        self._say(f"{len(injector.history):3}{done}")

    # ------------------------------------------------------------ the result

    def _compare(self, job: ChaosJob) -> LossComparison:
        request = self._request
        last = max(step for _, step in job.steps)
        plain = run_plainly(
            self._space,
            request.script,
            batch_size=request.batch_size,
            chunk_size=request.chunk_size,
            num_steps=last + 1,
            patience_seconds=request.patience_seconds,
            progress=self._progress,
        )
        return compare_losses(job.records, plain, tolerance=request.tolerance)

    def _report(
        self,
        injector: Injector,
        played: Played,
        losses: LossComparison,
        left: Leftovers,
        seconds: float,
    ) -> ChaosReport:
        job = injector.job
        notes = [f"{name} holds checkpoints: the runs do not see it" for name in self._space.left_out]
        redone = job.steps_redone
        return ChaosReport(
            outcome=played.outcome,
            problem=played.problem,
            seed=self._request.seed,
            machines=self._request.machines,
            seconds=round(seconds, 1),
            steps=len({step for _, step in job.steps}),
            generations=len({generation for generation, _ in job.steps}),
            faults=tuple(injector.history),
            steps_redone=redone,
            samples_redone=redone * self._request.batch_size,
            losses=losses,
            left_behind=left,
            ledger=played.ledger,
            notes=tuple(notes),
            needs_faults=self._request.trace is None or has_faults(self._request.trace),
        )


def random_faults(injector: Injector, *, seconds: float, hosts: bool) -> Iterator[ScheduledFault]:
    """Yield faults in random order, each kind once before any comes again, until the time is over."""
    chooser = injector.random
    usable = [
        name
        for name, kind in FAULTS.items()
        if (hosts or not kind.needs_hosts) and (not kind.is_slow or seconds >= 60 * HANG_MINUTES)
    ]
    left: list[str] = []
    while injector.now() < seconds:
        left = left or chooser.sample(usable, len(usable))
        kind = left.pop()
        if FAULTS[kind].is_slow:
            usable.remove(kind)
        # A machine that has left comes back after a while.
        duration = chooser.uniform(0.5, 3.0) if kind == "leave" else None
        yield ScheduledFault(FaultRequest(kind=kind, seconds=duration))
        pause(chooser.uniform(0.0, 1.0))


def _agent_pid(job: ChaosJob, machine: str) -> int | None:
    status = job.answering()
    machines = () if status is None else status.machines
    return next((one.agent_pid for one in machines if one.machine == machine), None)


def _tail(lines: Sequence[str]) -> str:
    return "\n".join(lines[-8:])
