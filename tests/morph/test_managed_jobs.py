"""Real jobs with automatic saves, notices of clouds, hangs and slow machines."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.morph.hosts import clouds
from tests.morph.jobs import TRAIN, Job, check

SAVES_NOTHING = "EVERY = 0\n"
"""A script that only names its store, once."""


class SeveralAws(clouds.Aws):
    """AWS for several machines: each has its own token, and the first machine gets a notice."""

    num_machines = 0

    def reply(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> clouds.Reply:
        if method == "PUT":
            self.num_machines += 1
            return 200, clouds.NO_HEADERS, f"machine-{self.num_machines}".encode()
        if headers["X-aws-ec2-metadata-token"] == "machine-1" and self.action:
            return 200, clouds.NO_HEADERS, json.dumps(self.action).encode()
        return 404, clouds.NO_HEADERS, b"not found"


class SeveralAzure(clouds.Azure):
    """Azure for several machines: each has its own name."""

    num_machines = 0

    def reply(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> clouds.Reply:
        if path == "/metadata/instance/compute/name":
            self.num_machines += 1
            return 200, clouds.NO_HEADERS, f"trainer_{self.num_machines}".encode()
        return super().reply(method, path, query, headers, body)


class SeveralGcp(clouds.Gcp):
    """GCP for several machines: the flag changes for the first that waits."""

    def reply(self, method: str, path: str, query: dict[str, str], headers: Any, body: bytes) -> clouds.Reply:
        with self.changed:
            known = query.get("last_etag", "")
            if known:
                self.changed.wait_for(
                    lambda: known == "etag-0" and self.preempted, timeout=float(query["timeout_sec"])
                )
            if known == "etag-0" and self.preempted:
                self.preempted, known = False, "etag-1"
            flag = b"TRUE" if known == "etag-1" else b"FALSE"
            return 200, {**self.flavor, "ETag": known or "etag-0"}, flag


def test_a_job_saves_automatically_and_drops_machines_before_they_are_taken_away(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """V41, V46, V47: a spot interruption of AWS, then SIGTERM to an agent; no step is repeated."""
    aws = SeveralAws()
    options = ["--save_every", "0.3", "--cloud", "aws", "--cloud_url", aws.url]
    with (
        clouds.running(aws),
        Job(tmp_path, machines=2, script=SAVES_NOTHING + TRAIN, options=options) as job,
    ):
        job.wait_for_steps(20)
        status = json.loads(job.varuna("status", "--json").stdout)
        assert status["saved_step"] > 1 and status["save_every_seconds"] == 0.3
        assert "; automatic every 0.3 s" in job.varuna("status").stdout
        said = json.loads(job.varuna("logs", "0", "--lines", "1", "--json").stdout)
        assert said["ok"] and "loss" in said["text"]
        check_nothing_is_exposed(job)

        aws.action = {"action": "terminate", "time": "2027-01-15T08:02:00Z"}
        doomed = job.wait_for("AWS will terminate this machine at 08:02:00 UTC").split(": ")[2]
        other = {"127.0.0.1": "127.0.0.2", "127.0.0.2": "127.0.0.1"}[doomed]
        job.wait_for_change(f"generation: 2: 1 stage x 1 replica, batch 12 in micro-batches of 2 on {other},")

        number = int(other[-1])
        job.write_list(1, 2, 3)
        job.wait_for_change("generation: 3: 1 stage x 2 replicas")
        assert f"on {other}, 127.0.0.3," in job.lines[-1]
        job.wait_for_steps(2)
        os.kill(job.agent(number), signal.SIGTERM)
        job.wait_for(f"notice: {other}: the agent got SIGTERM")
        job.wait_for_change("generation: 4: 1 stage x 1 replica")
        assert "on 127.0.0.3," in job.lines[-1]
        assert len(list((tmp_path / "store").glob("varuna_ckpt_*"))) <= 3  # one of them may be incomplete
        check(job, reference)
        assert f"machine lost: {other}" in job.text, "its agent did not end"
        assert "a stranger says so" not in job.text


def check_nothing_is_exposed(job: Job) -> None:
    """Check the process list, the files and the open ports."""
    contact = job.contact()
    secret = contact.credential.key.splitlines()[1].encode()  # a line of the private key
    (place,) = (job.folder / "home").glob("jobs/*/manager.json")
    assert place.stat().st_mode & 0o777 == 0o600 and place.parent.stat().st_mode & 0o777 == 0o700
    processes = job.processes()
    assert any("varuna.morph.run.agent" in line for line in processes.values())
    for pid in processes:
        seen = b"".join(Path(f"/proc/{pid}/{listing}").read_bytes() for listing in ("cmdline", "environ"))
        assert secret not in seen
    files = [path for path in job.folder.rglob("*") if path.is_file() and path != place]
    assert not [path for path in files if secret in path.read_bytes()]
    found = {address for pid in processes for address in listening(pid)}
    assert f"{contact.address}:{contact.port}" in found
    assert not [address for address in found if not address.startswith("127.0.0.")]
    assert call_as_another_user(job.agent(1)) == ""


CALL = """
import contextlib, os, socket, sys
os.setgid(65534)
os.setuid(65534)
with contextlib.suppress(ConnectionError), socket.socket(socket.AF_UNIX) as connection:
    connection.connect(chr(0) + sys.argv[1])
    connection.sendall(b'{"type": "Noticed", "seconds": 1, "why": "a stranger says so"}\\n')
    sys.stdout.write(connection.makefile().read())
"""


def call_as_another_user(agent: int) -> str:
    """Return the reply of an agent to a notice of another user."""
    own = sockets(agent)
    for line in Path(f"/proc/{agent}/net/unix").read_text().splitlines():
        inode, name = line.split()[-2:]
        if name.startswith("@varuna-") and f"socket:[{inode}]" in own:
            command = [sys.executable, "-c", CALL, name[1:]]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    raise AssertionError("the agent listens to nobody on its machine")


def sockets(pid: int) -> set[str]:
    found = set()
    for place in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(place))
        except OSError:
            continue  # closed meanwhile
    return found


def listening(pid: int) -> list[str]:
    """Return the addresses on which a process listens."""
    own = sockets(pid)
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in own:
                address, port = local.split(":")
                if table == "tcp":
                    address = ".".join(str(byte) for byte in reversed(bytes.fromhex(address)))
                found.append(f"{address}:{int(port, 16)}")
    return found


HANGS = """
import os, time
EVERY = 0

def delay(op, microbatch):
    if Path("hurry").exists():
        return 0.0
    slow = (op, microbatch, model.iteration, os.environ["VARUNA_GENERATION"]) == ("F", 0, 4, "1")
    return 2.5 if slow else 0.05

def misbehave(step):
    if (step, os.environ["VARUNA_GENERATION"], os.environ["RANK"]) == (8, "1", "1"):
        hang_for_ever()

def hang_for_ever():
    time.sleep(1e6)
"""


def test_a_job_that_hangs_restarts_with_its_stacks_in_the_logs_and_a_slow_job_does_not(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """V43, V41, V47: a step of 2.5 s among steps of 0.3 s is not a hang; then GCP preempts a machine.

    The restart uses an automatic save.
    """
    gcp = SeveralGcp()
    options = ["--hang_seconds", "2", "--cloud", "gcp", "--cloud_url", gcp.url]
    with clouds.running(gcp), Job(tmp_path, machines=2, script=HANGS + TRAIN, options=options) as job:
        assert "no progress for" in job.wait_for("generation: 2: 1 stage x 2 replicas")
        assert "from step" in job.lines[-1] and set(job.losses) == set(range(9))
        (log,) = tmp_path.glob("varuna_logs/*/generation_1/rank_1.err")
        assert "in hang_for_ever" in log.read_text()
        job.wait_for_steps(3)
        with gcp.changed:
            gcp.preempted = True
            gcp.changed.notify_all()
        job.wait_for("GCP preempts this machine")
        job.wait_for_change("generation: 3: 1 stage x 1 replica")
        check(job, reference)


SLOW = """
import os
EVERY = 0

def delay(op, microbatch):
    return 0.03 if os.environ["VARUNA_MACHINE"] == "127.0.0.3" else 0.0
"""


def test_a_slow_machine_is_listed_and_dropped_and_azure_gets_an_approval(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """V44, V41, V47"""
    azure = SeveralAzure()
    options = ["--exclude_slow", "--cloud", "azure", "--cloud_url", azure.url]
    with clouds.running(azure), Job(tmp_path, machines=3, script=SLOW + TRAIN, options=options) as job:
        job.wait_for("slow machine: 127.0.0.3 computes more slowly than other machines")
        assert (tmp_path / "slow_machines.out").read_text() == "127.0.0.3\n"
        job.wait_for_change("generation: 2: 1 stage x 2 replicas")
        assert "on 127.0.0.1, 127.0.0.2," in job.lines[-1]
        (events,) = tmp_path.glob("varuna_logs/*/events.jsonl")
        assert "slow machine" in [json.loads(line)["what"] for line in events.read_text().splitlines()]

        for number in range(1, azure.num_machines + 1):  # all of them, the slow one too
            azure.schedule("Preempt", f"trainer_{number}", seconds=30, name=f"E-{number}")
        job.wait_for("varuna: saving: ")
        azure.wait_for(lambda: sum(event["EventStatus"] == "Started" for event in azure.events) > 1)
        azure.events.clear()
        job.wait_for_change("generation: 3: ")
        check(job, reference)
