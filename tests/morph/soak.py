"""A soak test: one job on separate hosts survives one fault after the other.

    python -m tests.morph.soak --faults 50 --seed 7

The faults are those of `varuna chaos` (varuna/chaos/faults), and some that need this script and its disks.
After each fault the job must make a step. At the end it must have finished by itself, with the losses of
one undisturbed process, every sample of every step used once, no process left on any host, and only
complete checkpoints. A failed soak reports the seed, the faults so far and the manager's last output.
"""

import argparse
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import machine
from tests.launch.jobs import environment
from varuna.chaos.faults.kinds import FAULTS as COMMAND_FAULTS
from varuna.chaos.faults.kinds import FaultKind
from varuna.chaos.hosts.lab import ROOT, Host, Lab, command
from varuna.chaos.injector import PRESENT, FaultRequest, InjectedFault, Injector, fill
from varuna.chaos.job import ChaosJob, within_patience

SLOW_SECONDS = 0.05
"""A step takes at least this long while faults are injected."""
SAVE_EVERY = 10
DATA, BATCH, CHUNK = 144, 48, 4
"""Every number of replicas up to 4 has the same micro-batches, which BatchNorm needs for equal losses."""

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.cut, self.drop = CutPoint(), nn.Dropout(0.2)

    def forward(self, x, y):
        hidden = self.drop(torch.tanh(self.norm(self.first(x))))
        return ((self.last(self.cut(hidden)) - y) ** 2).mean()
"""

SCRIPT = f"""
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from varuna import CutPoint, SampleOrder, Varuna


{NET}

def slow_fsync(fd, fsync=os.fsync):  # the disk blocks while the file exists
    while Path("slow_disk").exists():
        Path("in_save").touch()
        time.sleep(0.01)
    fsync(fd)


def last_step():
    try:
        return int(Path("stop_at").read_text())
    except FileNotFoundError:
        return sys.maxsize


os.fsync = slow_fsync
torch.set_default_dtype(torch.float64)  # a difference is a mistake, not rounding
torch.manual_seed(1)
x = torch.randn({DATA}, 4)
y = x.sum(1, keepdim=True)
stage_map = os.environ.get("VARUNA_STAGE_TO_RANK_MAP", "0;")
joins = "VARUNA_JOINS" in os.environ  # it goes on where the others are, which may have gone back to copies
model = Varuna(Net(), stage_map, {{"x": x[:4], "y": y[:4]}}, {BATCH}, {CHUNK}, device="cpu", seed=3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model.set_optimizer(optimizer)
generation = int(os.environ.get("VARUNA_GENERATION", 0))
if generation:
    model.resume("store")
    resumed = os.environ.get("VARUNA_RESUME_STEP")  # a newer one may be broken
    assert resumed is None or int(resumed) >= model.iteration, (resumed, model.iteration)
    if not joins:
        print("begins at", model.iteration, "generation", os.environ["VARUNA_GENERATION"])
order = SampleOrder({DATA}, batch_size={BATCH}, seed=5)


def fetch(share):
    if model.stage == 0 and generation:
        print("uses", model.iteration, model.rank_within_stage, model.data_depth, *share)
    return {{"x": x[share], "y": y[share]}}


def batches():  # workers restart at every change
    while True:
        step, replicas = model.iteration, model.data_depth
        yield step, fetch(order.replica(step=step, replica=model.rank_within_stage, num_replicas=replicas))


for step, inputs in model.batches(fetch, order) if HOT else batches():
    if step >= last_step():
        break
    loss, overflow = model.step(inputs)
    if overflow:  # a stage without replicas was lost: the next batch is of an earlier step
        continue
    generation = int(os.environ.get("VARUNA_GENERATION", 0))
    replicas = model.data_depth
    optimizer.step()
    model.zero_grad()
    print("step", step, "loss", loss, "generation", generation, "replicas", replicas)
    if generation and model.iteration % {SAVE_EVERY} == 0:
        # Alternate between blocking and background saves, since both must survive the faults.
        now = model.iteration // {SAVE_EVERY} % 2 == 1
        model.checkpoint("store", keep_last=2, shard=True, tempdir=None if now else "scratch")
        if now:
            print("saved", model.iteration, "generation", os.environ["VARUNA_GENERATION"])
    if generation and not Path("stop_at").exists():
        time.sleep({SLOW_SECONDS})
print("trained")
"""

STEPS = re.compile(r"^step (\d+) loss (\S+) generation (\d+) replicas (\d+)\n", re.M)
USES = re.compile(r"^uses (\d+) (\d+) (\d+) (.*)\n", re.M)
"""Whole lines: a worker may be killed while it writes one."""
CHATTER = re.compile(r"\[rank 0\] (step|uses|saved|\[W)")


class Soak(Injector):
    """The job with this script, and its hosts. `hot`: its workers can morph in place."""

    def __init__(self, folder: Path, lab: Lab, *, seed: int, stages: int, hot: bool) -> None:
        self.folder = folder
        self.hot = hot
        self.lab = lab
        self.log_dirs: list[Path] = []
        (folder / "varuna").symlink_to(ROOT / "varuna")  # other machines find the library here
        (folder / "scratch").mkdir()
        (folder / "home").mkdir()  # the manager's, on a small disk
        command(["mount", "-t", "tmpfs", "-o", "size=4m", "soak", str(folder / "home")])
        for host in lab.hosts:
            host.keep_mounted(folder / "scratch", 32 << 20)
        (folder / "script.py").write_text(f"HOT = {hot}\n{SCRIPT}")
        (folder / "machines").write_text("".join(f"{host.address}\n" for host in lab.hosts))
        job = ChaosJob(
            folder,
            command=[
                *["--machine_list", "machines", "--gpus_per_node", "1", "--ssh", shlex.join(lab.ssh)],
                *["--batch_size", str(BATCH), "--chunk_size", str(CHUNK), "--nstages", str(stages)],
                "script.py",
            ],
            environment=environment(folder),
            home=folder / "home",
            losses=losses_folder(folder),
        )
        super().__init__(
            job,
            lab.hosts,
            machine_list=folder / "machines",
            seed=seed,
            stages=stages,
            batch_size=BATCH,
        )

    def begin(self) -> None:
        self.job.wait_for_generation(0)
        self.job.wait_for_steps(SAVE_EVERY + 2)

    def inject(self, fault: str) -> InjectedFault:
        """Inject a fault by its name. The job must make a step afterwards."""
        if (log_dir := self.log_dir) not in self.log_dirs:
            self.log_dirs.append(log_dir)
        done = self.do(FaultRequest(kind=fault), FAULTS[fault].inject)
        assert done.seconds is not None, fault
        if self.listing.off:  # a machine that has left comes back for the next fault
            self.listing.add(*self.listing.off)
        return done

    def end(self) -> None:
        """V34, V42, V47: the checks at the top of this file."""
        self.wait_for_returns()
        if (log_dir := self.log_dir) not in self.log_dirs:
            self.log_dirs.append(log_dir)
        last = self.job.step + 50
        part = self.folder / "stop_at.part"
        part.write_text(str(last))
        part.rename(self.folder / "stop_at")
        code = self.job.wait_for_ended()
        assert code == 0 and "finished: every worker ended normally" in self.job.text, code
        self.check_losses(last)
        verified = subprocess.run(
            [sys.executable, "-m", "varuna", "checkpoint", "verify", "--all", str(self.folder / "store")],
            cwd=self.folder,
            env=environment(self.folder),
            capture_output=True,
            text=True,
        )
        broken = {int(step) for step in re.findall(r"^checkpoint (\d+): broken$", verified.stdout, re.M)}
        assert broken <= self.flipped, verified.stdout + verified.stderr
        for _ in within_patience("processes are left on hosts", seconds=10, pause_seconds=0.1):
            if not any(host.processes() for host in self.lab.hosts):
                break

    def wait_for_returns(self) -> None:
        """Wait until machines that were cut off have killed their workers."""
        for _ in within_patience("some machines do not come back", pause_seconds=0.1):
            self.job.read_all()
            back = self.machines(*PRESENT)
            if all(host in back or not host.processes() for host in self.lab.hosts):
                return

    def check_losses(self, last: int) -> None:
        found = read_logs(self.log_dirs)
        saved = 0
        for what, step in found.starts_and_saves:
            assert what == "saved" or step >= saved, f"it goes on from {step}, though {saved} had been saved"
            if what == "saved" and step not in self.flipped:
                saved = max(saved, step)
        losses = {step: done.loss for step, done in found.steps.items()}
        samples = {
            step: [
                sample
                for replica in range(done.replicas)
                for sample in found.shares[step, replica, done.replicas]
            ]
            for step, done in found.steps.items()
        }
        reference = reference_losses(self.folder)
        assert sorted(losses) == sorted(reference) == list(range(last)), (last, len(losses), len(reference))
        off = {
            step: (losses[step], reference[step])
            for step in reference
            if not close(losses[step], reference[step])
        }
        assert not off, f"{len(off)} losses differ, such as {dict(list(off.items())[:5])}"
        self.worst = max(abs(losses[step] - reference[step]) / reference[step] for step in reference)
        per_epoch = -(-DATA // BATCH)
        for epoch in range(last // per_epoch):
            steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
            used = Counter(sample for step in steps for sample in samples[step])
            assert used == dict.fromkeys(range(DATA), 1), f"epoch {epoch}: {used}"

    def generation_folders(self) -> list[Path]:
        return [
            folder
            for logs in self.log_dirs
            for folder in sorted(logs.glob("generation_*"), key=lambda path: int(path.name.split("_")[1]))
        ]

    def report(self) -> str:
        rows = [f"{number:3}{done}" for number, done in enumerate(self.history, start=1)]
        return "\n".join([f"seed {self.seed}, {self.stages} stages, {len(self.lab.hosts)} hosts", *rows])


# ---------------------------------------------------------------- faults of this script and these hosts


def as_soak(run: Injector) -> tuple[Soak, Host]:
    """Return the soak, and a host with workers."""
    assert isinstance(run, Soak)
    (host,) = run.at_work()
    assert isinstance(host, Host)
    return run, host


def lose_machine_within_save(run: Injector) -> None:
    soak, host = as_soak(run)
    dies = soak.any_death()
    (soak.folder / "in_save").unlink(missing_ok=True)
    (soak.folder / "slow_disk").touch()
    for _ in within_patience("nothing is saved", pause_seconds=0.002):
        if (soak.folder / "in_save").exists():
            break
    soak.happens(f"in the middle of a save, {'the end of' if dies else 'a cut to'}", host)

    def lose_for_good() -> None:
        soak.lose([host], dies=dies)
        soak.job.wait_for(lambda line: "generation ended: " in line or "recovering: " in line)
        (soak.folder / "slow_disk").unlink()

    soak.outlive([host], lose_for_good, repair=lambda: soak.bring_back([host], died=dies), sign="")


def shift_clock(run: Injector) -> None:
    soak, host = as_soak(run)
    seconds = soak.random.choice([-86400.0, -600.0, 600.0, 86400.0])
    soak.happens(f"a clock that jumps by {seconds:+.0f} s, then kill -9 of the worker of", host)
    host.set_clock(seconds)
    soak.kill_worker(host)
    soak.recovers()
    soak.job.wait_for_steps(SAVE_EVERY)


def fill_scratch_disk(run: Injector) -> None:
    """The disk for snapshots of saves is full when workers start."""
    soak, host = as_soak(run)
    filling = host.path(soak.folder / "scratch") / "fill"
    soak.happens("a full scratch disk, then kill -9 of the worker of", host)
    fill(filling)
    soak.kill_worker(host)
    soak.recovers()
    soak.job.wait_for_steps(3 * SAVE_EVERY)
    filling.unlink()


def fill_home_disk(run: Injector) -> None:
    """The manager cannot write its journal; the job restarts nevertheless."""
    soak, host = as_soak(run)
    filling = soak.folder / "home" / "fill"
    restart = soak.random.random() < 0.5
    soak.happens(f"a full disk of the manager, {'its kill -9, ' * restart}then kill -9 of", host)
    fill(filling)
    soak.kill_worker(host)
    if restart:
        soak.job.kill_manager()
        filling.unlink()
        soak.resume_manager(restarts=True)
    else:
        soak.recovers()
        filling.unlink()


FAULTS = {
    **COMMAND_FAULTS,
    "lose-machine-within-save": FaultKind(lose_machine_within_save, "a machine is lost within a save"),
    "shift-clock": FaultKind(shift_clock, "the wall clock of a machine jumps"),
    "fill-scratch-disk": FaultKind(fill_scratch_disk, "the disk for snapshots is full"),
    "fill-home-disk": FaultKind(fill_home_disk, "the disk of the manager's journal is full"),
}


def losses_folder(folder: Path) -> Path:
    """Return the folder of the loss files; hosts and this test share it."""
    found = folder / "losses"
    found.mkdir(exist_ok=True)
    return found


class FinishedStep(msgspec.Struct, frozen=True):
    """A step as the workers of its last generation report it."""

    place: tuple[int, int]  # job, generation
    loss: float
    replicas: int


class JobLogs(msgspec.Struct):
    """What all workers of a job have logged. A worker that morphs in place keeps its log."""

    steps: dict[int, FinishedStep] = {}
    shares: dict[tuple[int, int, int], list[int]] = {}  # samples by step, replica and number of replicas
    starts_and_saves: list[tuple[str, int]] = []  # "begins at" or "saved", and the step; in their order


def read_logs(log_dirs: Sequence[Path]) -> JobLogs:
    logs = JobLogs()
    noted: list[tuple[tuple[int, int], int, str]] = []
    for job, folder in enumerate(log_dirs):
        for path in {path.resolve() for path in folder.glob("generation_*/rank_*.out")}:
            text = path.read_text()
            for step, loss, generation, replicas in STEPS.findall(text):
                done = FinishedStep((job, int(generation)), float(loss), int(replicas))
                known = logs.steps.get(int(step))
                if known is None or done.place >= known.place:
                    logs.steps[int(step)] = done
            for step, replica, replicas, share in USES.findall(text):
                logs.shares[int(step), int(replica), int(replicas)] = [int(one) for one in share.split()]
            for what, step, generation in re.findall(
                r"^(begins at|saved) (\d+) generation (\d+)$", text, re.M
            ):
                noted.append(((job, int(generation)), int(step), what))
    logs.starts_and_saves = [(what, step) for _, step, what in sorted(noted)]
    return logs


def close(one: float, other: float) -> bool:
    """Compare with a tolerance: another number of replicas sums in another order."""
    return abs(one - other) <= 1e-5 * abs(other) + 1e-9


def reference_losses(folder: Path) -> dict[int, float]:
    """Return the losses of one undisturbed process."""
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return read_losses(done.stdout)


def read_losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+) ", text, re.M)}


@contextmanager
def soaking(folder: Path, *, seed: int, stages: int, hosts: int, hot: bool = True) -> Iterator[Soak]:
    """Run a soak; add the seed, the faults so far and the manager's last output to any error."""
    with Lab(hosts, {"VARUNA_LOSSES": str(losses_folder(folder))}) as lab:
        soak = Soak(folder, lab, seed=seed, stages=stages, hot=hot)
        with unmounting(folder / "home"), soak.job:
            try:
                soak.begin()
                yield soak
            except BaseException as error:
                (folder / "home" / "fill").unlink(missing_ok=True)
                tail = [line for line in soak.job.lines if not CHATTER.match(line)][-60:]
                error.add_note("\n".join(["", soak.report(), "", *tail]))
                raise


@contextmanager
def unmounting(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        command(["umount", "--lazy", str(folder)])


def choose(chooser: random.Random, count: int) -> list[str]:
    """Choose each fault equally often, but a hang, which takes a minute, only once."""
    often = [fault for fault, kind in FAULTS.items() if not kind.is_slow]
    chosen = [*often, *(fault for fault, kind in FAULTS.items() if kind.is_slow)]
    while len(chosen) < count:
        chosen += often
    chosen = chosen[:count]
    chooser.shuffle(chosen)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--warm", action="store_true", help="the script passes tensors: no morph in place")
    parser.add_argument("--only", nargs="*", choices=FAULTS, help="these, in this order")
    parser.add_argument("--out", type=Path, help="a JSON file that gets the result")
    parser.add_argument("--keep", action="store_true", help="leave the folder where it is")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="varuna-soak-"))
    print(folder, flush=True)
    faults = options.only or choose(random.Random(options.seed), options.faults)
    began = time.monotonic()
    try:
        where = {"seed": options.seed, "stages": options.stages, "hosts": options.hosts}
        with soaking(folder, **where, hot=not options.warm) as soak:
            for fault in faults:
                done = soak.inject(fault)
                print(f"{len(soak.history):3}{done}", flush=True)
            soak.end()
        print(f"clean: {len(faults)} faults in {time.monotonic() - began:.0f} s, {soak.job.step + 1} steps")
        if options.out:
            add_result(soak, time.monotonic() - began, options.out)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def add_result(soak: Soak, seconds: float, path: Path) -> None:
    """Add the result to those of the same machine."""
    known = json.loads(path.read_text()) if path.exists() else {}
    runs = known.get("runs", []) if known.get("machine") == machine() else []
    found = {"machine": machine(), "runs": [*runs, result(soak, seconds)]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def result(soak: Soak, seconds: float) -> dict[str, Any]:
    return {
        "seed": soak.seed,
        "stages": soak.stages,
        "in_place": soak.hot,
        "hosts": len(soak.lab.hosts),
        "outcome": "clean",
        "steps": soak.job.step + 1,
        "generations": len(soak.generation_folders()),
        "worst_relative_loss": soak.worst,
        "seconds": round(seconds, 1),
        "faults": [msgspec.structs.asdict(done) for done in soak.history],
    }


if __name__ == "__main__":
    main()
