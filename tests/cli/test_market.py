"""`varuna simulate --trace` and `varuna ledger`, as users type them (B5, B6, PRO-3, PRO-4)."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.commands import Cli
from tests.plan.profiles import profile, segment
from varuna.cli.ledger import prices_of
from varuna.codec import encode
from varuna.observe.ledger import Interruption, Ledger
from varuna.plan.search.choose import Choice, choose
from varuna.simulate.costs import Costs, read_costs

TRACE = "0,add,a\n0,add,b\n0,add,c\n600000,remove,a\n900000,add,d\n3600000,remove,b\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_a_trace_is_played_with_a_profile(cli: Cli, tmp_path: Path, trace: Path) -> None:
    """B5, PRO-3: all policies, as a table, as JSON and as a page; every paid second has a cause."""
    (tmp_path / "profile.json").write_text(encode(profile([segment(1e-2)] * 4, [0] * 16)))
    page, picture = tmp_path / "page.html", tmp_path / "layouts.svg"
    asked = ["simulate", "--trace", trace, "--profile", tmp_path, "--batch-size", 32, "--per-machine", 1]
    money = ["--price", "0.5", "--on-demand-price", "2", "--notice", "120"]
    assert cli(*asked, *money, "--html", page, "--svg", picture, "--json") == 0, cli.err
    found = json.loads(cli.out)
    assert [one["policy"] for one in found["policies"]] == [
        *("varuna", "restart", "torchrun", "drop-replicas", "on-demand")
    ]
    for one in found["policies"]:
        report = one["report"]
        assert report["useful_seconds"] + sum(report["lost_seconds"].values()) == pytest.approx(
            report["paid_seconds"]
        )
        assert report["samples"] > 0 and report["money"]["paid"] > 0
    assert found["policies"][0]["report"]["goodput"] > found["policies"][1]["report"]["goodput"]
    assert found["save_intervals"][0]["goodput"] == max(one["goodput"] for one in found["save_intervals"])
    assert "<svg" in page.read_text() and picture.read_text().startswith("<svg")
    assert cli(*asked, "--policies", "varuna,on-demand") == 0
    assert "goodput" in cli.out and "torchrun" not in cli.out and "best fixed save interval" in cli.out
    assert cli(*asked) == 0
    lines = cli.out.splitlines()
    for one in found["policies"]:
        (line,) = [line for line in lines if line.startswith(f"{one['policy']}: ")]
        assert line.endswith(f"; costs: {one['costs']}"), line
    rows = [
        line.split()[:2]
        for line in lines
        if line.split(" ")[0] in {one["policy"] for one in found["policies"]}
    ]
    assert rows == [
        *(["varuna", "assumed"], ["restart", "published"], ["torchrun", "torchrun"]),
        *(["drop-replicas", "assumed"], ["on-demand", "assumed"]),
    ]


def test_the_best_save_interval_is_shown_however_long_planning_took(
    cli: Cli, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5, PRO-3: each plan takes ten seconds of a clock that stands still otherwise; plans are made once."""
    now = [0.0]

    def plan_slowly(*given: Any, **more: Any) -> Choice:
        now[0] += 10.0
        return choose(*given, **more)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("varuna.simulate.planner.choose", plan_slowly)
    asked = ["simulate", "--trace", trace, "--batch-size", 12, "--step-seconds", 2, "--per-machine", 1]
    assert cli(*asked, "--policies", "varuna") == 0, cli.err
    assert "best fixed save interval" in cli.out
    assert "simulated in 0.0 s" in cli.out and "plans in " in cli.out and "plans in 0" not in cli.out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--save-every", "30"], "--save-every gives the interval"),
        (["--policies", "restart"], "--policies has no varuna"),
        (["--hours", "0.003"], "the trace lasts 11 s, and the shortest interval is 15 s"),
    ],
)
def test_a_best_save_interval_that_is_not_searched_has_a_reason(
    cli: Cli, tmp_path: Path, trace: Path, options: list[str], why: str
) -> None:
    """B5, PRO-3: in every output; whoever asks for it gets an error."""
    asked = ["simulate", "--trace", trace, "--batch-size", 12, "--step-seconds", 2, "--per-machine", 1]
    page = tmp_path / "page.html"
    assert cli(*asked, *options, "--html", page) == 0, cli.err
    assert f"best fixed save interval: not searched: {why}" in cli.out
    assert f"not searched: {why}" in page.read_text()
    assert cli(*asked, *options, "--json") == 0, cli.err
    found = json.loads(cli.out)
    assert (found["save_intervals"], found["save_intervals_note"]) == ([], why)
    assert cli(*asked, *options, "--best-interval") == 2 and f"--best-interval: {why}" in cli.err


def test_a_slow_search_of_the_best_save_interval_is_made_only_on_request(
    cli: Cli, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5, PRO-3: a clock by which every simulation takes four seconds."""
    now = [0.0]

    def read() -> float:
        now[0] += 4.0
        return now[0]

    monkeypatch.setattr(time, "perf_counter", read)
    asked = ["simulate", "--trace", trace, "--batch-size", 12, "--step-seconds", 2, "--per-machine", 1]
    assert cli(*asked, "--policies", "varuna") == 0, cli.err
    assert "not searched: a simulation takes" in cli.out and "(give --best-interval)" in cli.out
    assert cli(*asked, "--policies", "varuna", "--best-interval") == 0, cli.err
    assert "best fixed save interval: " in cli.out and "not searched" not in cli.out
    assert cli(*asked, "--policies", "varuna", "--no-best-interval") == 0, cli.err
    assert "not searched: --no-best-interval is given" in cli.out


def test_a_price_table_that_misses_machines_is_reported(cli: Cli, tmp_path: Path, trace: Path) -> None:
    """B6, PRO-4"""
    prices = tmp_path / "prices.csv"
    prices.write_text("machine,price\na,1\nb,1\n")
    asked = ["simulate", "--trace", trace, "--batch-size", 12, "--step-seconds", 2, "--per-machine", 1]
    assert cli(*asked, "--policies", "varuna", "--price", prices) == 0, cli.err
    assert "no price for c, d: counted as free" in cli.err


def test_costs_are_measured_from_a_ledger(cli: Cli, tmp_path: Path, trace: Path) -> None:
    """B5, PRO-3"""
    change = Interruption(
        at=5.0, why="b joins", kind="change", seconds={"saving": 3.0, "gathering": 0.5, "starting": 7.0}
    )
    ledger = Ledger(interruptions=[change], join_seconds=[11.0, 13.0], step_seconds=2.0, at=9.0)
    (tmp_path / "ledger.json").write_bytes(msgspec.json.encode(ledger))
    out = tmp_path / "costs.json"
    assert cli("simulate", "--calibrate", tmp_path, "--out", out) == 0, cli.err
    costs = read_costs(out)
    assert (costs.start_seconds, costs.gather_seconds, costs.join_seconds) == (7.0, 0.5, 12.0)
    assert costs.leave_seconds == 2.0 and "save_seconds" in costs.estimated
    asked = ["simulate", "--trace", trace, "--batch-size", 12, "--step-seconds", 2, "--costs", out]
    assert cli(*asked, "--policies", "varuna", "--per-machine", 1) == 0, cli.err
    missing = "detect_seconds, end_seconds, save_seconds, write_seconds"
    assert f"costs that were not measured: {missing}" in cli.out
    assert cli(*asked, "--policies", "varuna", "--per-machine", 1, "--json") == 0, cli.err
    in_place = json.loads(cli.out)["policies"][0]["report"]
    assert cli(*asked, "--policies", "varuna", "--per-machine", 1, "--json", "--no-hot") == 0, cli.err
    restarts = json.loads(cli.out)["policies"][0]["report"]
    assert in_place["goodput"] > restarts["goodput"], "in place by default, as `varuna run`"
    assert cli("ledger", tmp_path, "--price", "2", "--html", tmp_path / "page.html") == 0, cli.err
    assert "no machine was paid yet" in cli.out


def test_reasons_of_workers_are_shown_as_they_are(cli: Cli, tmp_path: Path) -> None:
    """PRO-5: brackets are text, and control characters are escaped."""
    whys = "KeyError: '[/INST]'", "shape [batch, 3] at index [i]", "\x1b[2J"
    found = [Interruption(at=5.0, why=why, kind="change", lost={"idle": 1.0}) for why in whys]
    (tmp_path / "ledger.json").write_bytes(msgspec.json.encode(Ledger(interruptions=found, at=9.0)))
    assert cli("ledger", tmp_path) == 0, cli.err
    assert all(shown in cli.out for shown in (*whys[:2], "\\x1b[2J"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give PROFILE and PLAN to simulate a step, --trace FILE"),
        (["."], "PLAN is missing"),
        (["--calibrate", ".", "--best-interval"], "--best-interval plays a trace of machines"),
        (["--trace", "nowhere.csv"], "cannot read the trace"),
        (["--trace", "{trace}"], "--batch-size is missing"),
        (["--trace", "{trace}", "--batch-size", "8"], "the time of a step is not known"),
        (["--trace", "{trace}", "--batch-size", "8", "--step-seconds", "-1"], "--step-seconds must be"),
        (["--trace", "{trace}", "--batch-size", "8", "--step-seconds", "1", "--hours", "0"], "--hours must"),
        (["--trace", "{trace}", "--batch-size", "8", "--step-seconds", "1", "--policies", "luck"], "luck"),
        (
            [
                "--trace",
                "{trace}",
                "--batch-size",
                "8",
                "--step-seconds",
                "1",
                "--stages",
                "9",
                "--per-machine",
                "1",
            ],
            "does not run on 3 machines: too few devices",
        ),
        (["--calibrate", "nowhere"], "there is no ledger"),
        (["--costs", "{trace}", "--calibrate", "."], "exclude each other"),
        (["--costs", "{trace}", "--trace", "{trace}"], "is not a valid Costs"),
        (["--trace", "{trace}", "--batch-size", "8", "--step-seconds", "1", "--price", "much"], "--price"),
    ],
)
def test_wrong_options_are_refused_in_one_line(cli: Cli, trace: Path, arguments: list[str], why: str) -> None:
    """B5, PRO-3"""
    given = [argument.replace("{trace}", str(trace)) for argument in arguments]
    assert cli("simulate", *given) == 2
    assert why in cli.err and cli.err.count("\n") == 1


def test_costs_with_an_unknown_name_or_a_negative_number_are_refused(tmp_path: Path) -> None:
    for text in ('{"join": 3}', '{"join_seconds": -3}', "[]"):
        path = tmp_path / "costs.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"costs\.json is not a valid Costs"):
            read_costs(path)
    path.write_text("{}")
    assert read_costs(path) == Costs()


@pytest.mark.parametrize("command", ["run", "ledger", "simulate"])
def test_a_price_is_a_number_that_files_can_hold(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """JSON has no infinity: a ledger with one could not be read at --resume."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ledger.json").write_text(encode(Ledger(begun_at=1.0, at=2.0, machines={"a": 1.0})))
    given = {
        "run": ["--machine-list", "machines", "--batch-size", "8", "--show-config", "script.py"],
        "ledger": ["."],
        "simulate": ["--trace", "t", "--batch-size", "8", "--step-seconds", "1"],
    }
    for price in ("inf", "nan", "-1", "1e10"):
        assert cli(command, "--on-demand-price", price, *given[command]) == 2
        assert "--on-demand-price" in cli.err


def test_a_price_table_of_a_spreadsheet_has_the_price_of_its_first_machine(tmp_path: Path) -> None:
    """Such programs write a mark before the first line."""
    path = tmp_path / "prices.csv"
    for head in ("", "machine,price\n"):
        path.write_bytes(b"\xef\xbb\xbf" + f"{head}a,0.5\nb,1\n".encode())
        assert prices_of(str(path)) == {"a": 0.5, "b": 1.0}
