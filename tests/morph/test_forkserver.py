"""The fork server ends its workers with its supervisor, and its workers are like new processes."""

import json
import subprocess
import sys
from pathlib import Path

from tests.launch.jobs import environment

FORK_SERVER = "from varuna.morph.run.forkserver import main; main()"


def test_workers_end_when_their_supervisor_is_silent_for_the_lease(tmp_path: Path) -> None:
    """V42: the job continues elsewhere, so these workers must end."""
    (tmp_path / "script.py").write_text("import signal; signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER, "1"],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        request = {
            "key": "1/0",
            "environment": {},
            "out": str(tmp_path / "out"),
            "err": str(tmp_path / "err"),
            "code_dir": str(tmp_path),
            "script": "script.py",
            "arguments": [],
        }
        print(json.dumps({"fork": request}), file=server.stdin, flush=True)
        assert [list(json.loads(server.stdout.readline())) for _ in range(2)] == [["ready"], ["forked"]]
        assert json.loads(server.stdout.readline()) == {"ended": {"key": "1/0", "code": -9}}
        server.stdin.close()
        assert server.stdout.read() == ""


DRAW = """
import random, sys
import numpy, torch
print(random.random(), numpy.random.rand(), torch.rand(()).item(), sep="\\n")
"""


def test_workers_draw_different_random_numbers(tmp_path: Path) -> None:
    """As processes of torchrun do: a script without a seed must not depend on what the server has loaded."""
    (tmp_path / "script.py").write_text(DRAW)
    with subprocess.Popen(
        [sys.executable, "-c", FORK_SERVER, "60", "numpy", "torch"],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        for worker in ("0", "1"):
            request = {
                "key": f"1/{worker}",
                "environment": {},
                "out": str(tmp_path / f"out_{worker}"),
                "err": str(tmp_path / "err"),
                "code_dir": str(tmp_path),
                "script": "script.py",
                "arguments": [],
            }
            print(json.dumps({"fork": request}), file=server.stdin, flush=True)
        codes: list[int] = []
        while len(codes) < 2:
            codes += [ended["code"] for ended in [json.loads(server.stdout.readline()).get("ended")] if ended]
        server.stdin.close()
    assert codes == [0, 0]
    first, second = ((tmp_path / f"out_{worker}").read_text().split() for worker in ("0", "1"))
    assert len(first) == 3
    assert not set(first) & set(second)
