"""The tables of docs/files.md name exactly the keys that the code writes."""

import re
from pathlib import Path

import msgspec
import pytest

from varuna.morph.protocol.generations import MACHINES, write_machines
from varuna.morph.state import Generation
from varuna.observe.history_file import MetricLine
from varuna.observe.job_view import EventView, JobView, LayoutView, MachineView
from varuna.observe.ledger import Interruption, LayoutPeriod, Ledger, LedgerReport, Money
from varuna.observe.step_timelines import StepTimelines
from varuna.plan.search.choose import lay_out
from varuna.types import Interval, StageTime, StepReport

TEXT = (Path(__file__).parents[2] / "docs/files.md").read_text()
STRUCTS: dict[str, type[msgspec.Struct]] = {
    "metrics.jsonl": MetricLine,
    "job_view.json": JobView,
    "layout in job_view.json": LayoutView,
    "machines in job_view.json": MachineView,
    "events in job_view.json": EventView,
    "ledger in job_view.json": LedgerReport,
    "money in job_view.json": Money,
    "ledger.json": Ledger,
    "interruptions in ledger.json": Interruption,
    "periods in ledger.json": LayoutPeriod,
    "report.json": StepReport,
    "stages in report.json": StageTime,
    "timeline.json": StepTimelines,
    "intervals in timeline.json": Interval,
}


def sections() -> dict[str, str]:
    """The text below each heading of the keys."""
    keys = TEXT.partition("\n## Keys of the files of a job\n")[2]
    parts = re.split(r"^#{3,4} (.+)$", keys, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("heading", STRUCTS)
def test_the_keys_of_a_file_are_those_of_its_struct(heading: str) -> None:
    rows = re.findall(r"^\| (`.*?) \|", sections()[heading], re.MULTILINE)
    listed = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    written = [field.encode_name for field in msgspec.structs.fields(STRUCTS[heading])]
    assert sorted(listed) == sorted(written)


def test_the_file_of_machines_has_the_ranks_of_each(tmp_path: Path) -> None:
    layout = lay_out(4, 2, batch_size=8, microbatch_size=2)
    machines, ranks = ("127.0.0.1", "127.0.0.2"), ((0, 1), (2, 3))
    write_machines(tmp_path, Generation(3, machines, ranks, ("a", "b"), layout, None, "", 0))
    (example,) = re.findall(r"```json\n(.*?)```", sections()[MACHINES], re.DOTALL)
    found = msgspec.json.decode((tmp_path / "generation_3" / MACHINES).read_bytes())
    assert found == msgspec.json.decode(example)


def test_every_section_is_compared() -> None:
    assert set(sections()) == {*STRUCTS, MACHINES}
