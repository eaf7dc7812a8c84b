"""The process that forks workers is their guard."""

import json
import subprocess
import sys
from pathlib import Path

from tests.launch.jobs import environment

NURSERY = (
    "import varuna.morph.run.forkserver as n; n.LEASE_SECONDS = 1; n.preload = lambda *names: None; n.main()"
)


def test_workers_of_an_agent_that_stands_still_end(tmp_path: Path) -> None:
    """V42: nobody else could end them, and the job goes on elsewhere."""
    (tmp_path / "script.py").write_text("import signal; signal.pause()")
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as nursery:
        assert nursery.stdin is not None and nursery.stdout is not None
        orders = {
            "key": "1/0",
            "environment": {},
            "out": str(tmp_path / "out"),
            "err": str(tmp_path / "err"),
            "code_dir": str(tmp_path),
            "script": "script.py",
            "arguments": [],
        }
        print(json.dumps({"fork": orders}), file=nursery.stdin, flush=True)
        assert [list(json.loads(nursery.stdout.readline())) for _ in range(2)] == [["ready"], ["forked"]]
        assert json.loads(nursery.stdout.readline()) == {"ended": {"key": "1/0", "code": -9}}
        nursery.stdin.close()
        assert nursery.stdout.read() == ""
