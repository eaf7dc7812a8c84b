"""Scripts of faults: what is read, and what is refused with the nearest known name (B5, PRO-2)."""

from pathlib import Path

import pytest

from varuna.chaos.faults.kinds import FAULTS
from varuna.chaos.injector import FaultRequest
from varuna.chaos.script import ScheduledFault, read_script


def read(folder: Path, text: str, *, machines: int = 3, hosts: bool = False) -> list[ScheduledFault]:
    path = folder / "faults.toml"
    path.write_text(text)
    return read_script(path, machines=machines, hosts=hosts)


def test_faults_keep_their_order_times_and_options(tmp_path: Path) -> None:
    text = """
    [[fault]]
    kind = "kill-worker"
    at = 5
    machine = 2
    [[fault]]
    kind = "notice"
    seconds = 4.5
    """
    assert read(tmp_path, text) == [
        ScheduledFault(FaultRequest(kind="kill-worker", machine=2), 5.0),
        ScheduledFault(FaultRequest(kind="notice", seconds=4.5), None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no fault: write [[fault]]"),
        ("[[faults]]\nkind = 'drain'", "unknown table 'faults'; expected [[fault]]"),
        ("[fault]\nkind = 'drain'", "has no fault"),
        (
            "[[fault]]\nkind = 'kill-wroker'",
            "fault 1: unknown kind 'kill-wroker'; did you mean 'kill-worker'?",
        ),
        ("[[fault]]\nat = 3", "fault 1: unknown kind None; expected one of kill-worker, "),
        ("[[fault]]\nkind = 'drain'\nmashine = 1", "unknown key 'mashine'; did you mean 'machine'?"),
        ("[[fault]]\nkind = 'drain'\nmachine = 4", "machine must be 1 to 3, not 4"),
        ("[[fault]]\nkind = 'drain'\nmachine = true", "machine must be 1 to 3, not True"),
        (
            "[[fault]]\nkind = 'notice'\nseconds = -1",
            "seconds must be a number of seconds from 0.01 on, not -1",
        ),
        ("[[fault]]\nkind = 'drain'\nseconds = 1", "drain does not use 'seconds' (remove it)"),
        ("[[fault]]\nkind = 'cut-link'", "cut-link needs machines with a network and disks of their own"),
        (
            "[[fault]]\nkind = 'drain'\nat = 5\n[[fault]]\nkind = 'drain'\nat = 4",
            "fault 2: at = 4 is before the fault above (5)",
        ),
        ("[[fault]\n", "is not a TOML file"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read(tmp_path, text)
    assert message in str(error.value)


def test_every_kind_can_be_written_with_hosts(tmp_path: Path) -> None:
    text = "".join(f"[[fault]]\nkind = {kind!r}\n" for kind in FAULTS)
    assert [one.request.kind for one in read(tmp_path, text, hosts=True)] == list(FAULTS)
