"""Plans and profiles that reach the wrapped model: taken where the script leaves room, refused by name."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import varuna.profile.profiler
from tests.launch.planned_net import get_batch
from tests.plan.profiles import link, reductions
from tests.pool import Pool
from tests.profile.ladders import BRIEF
from varuna import CutPoint, Varuna
from varuna.codec import decode, encode
from varuna.errors import PlanError
from varuna.plan.profile_file import NAME, read_profile
from varuna.profile.link_probe import ProcessCosts
from varuna.profile.profiler import Profiler
from varuna.train.layout import Prediction
from varuna.train.report import Reporter
from varuna.types import (
    Forecast,
    Interval,
    MemoryForecast,
    Plan,
    Proposal,
    StageForecast,
    StagePlan,
    StageTime,
    StepReport,
    Timeline,
)

SECONDS = 0.01


@torch.library.custom_op("varuna_tests::toil", mutates_args=())
def toil(x: Tensor) -> Tensor:
    """Work that no shape tells of."""
    begun = time.thread_time()
    while time.thread_time() < begun + SECONDS:
        pass
    return x.clone()


toil.register_fake(lambda x: torch.empty_like(x))
toil.register_autograd(lambda _context, gradient: gradient)


class Misleading(nn.Module):
    """By its shapes all work is in the last segments; by the clock, in the first."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = toil(x)
        for layer, cut in zip(self.layers, [*self.cuts, nn.Identity()], strict=True):
            x = cut(torch.tanh(layer(x)))
        return ((x - y) ** 2).mean()


def wrap(mapping: str = "0;", **options: Any) -> Varuna:
    arguments: dict[str, Any] = {"batch_size": 4, "chunk_size": 1, "device": "cpu", "from_cache": False}
    return Varuna(Misleading(), mapping, get_batch(2), **(arguments | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real profile, but for the links, which are of no interest here."""
    folder = tmp_path_factory.mktemp("profile")
    with pytest.MonkeyPatch.context() as patch:
        near = ProcessCosts(link(1e-5, 1e9), reductions(1e9, between=False, groups=(2,)), 0)
        patch.setattr(varuna.profile.profiler, "measure_with_processes", lambda *_: near)
        Profiler(Misleading(), get_batch, device="cpu", out_folder=folder, effort=BRIEF).profile_all([1])
    return folder


def spans(plan: Plan) -> list[tuple[int, int]]:
    return [(stage.first, stage.stop) for stage in plan.stages]


# ---------------------------------------------------------------- a profile


def test_stages_are_cut_by_the_clock_not_by_the_count_of_operations(pool: Pool, folder: Path) -> None:
    """V26: only the first rank needs to reach the profile. Without one, shapes decide as before."""
    by_shape, by_clock = pool.run(cuts, 2, str(folder))[0]
    assert by_shape == [(0, 2), (2, 4)]
    assert by_clock == [(0, 1), (1, 4)]


def cuts(folder: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    import torch.distributed as dist

    at_hand = folder if dist.get_rank() == 0 else "/nowhere"
    found = []
    for profile_folder in (None, at_hand):
        model = wrap("0;1;", profile_folder=profile_folder)
        found.append(spans(model.plan))
        model.close()
    return found[0], found[1]


def test_stages_keep_within_the_memory_of_their_device(folder: Path, tmp_path: Path) -> None:
    """V26: where nothing fits, the planner says by how much."""
    small = msgspec.structs.replace(read_profile(folder), device_memory_bytes=1000)
    (tmp_path / NAME).write_text(encode(small))
    with pytest.raises(PlanError, match=r"no layout fits.*too little"):
        wrap(profile_folder=tmp_path)


def test_recompute_comes_where_memory_asks_for_it(folder: Path, tmp_path: Path) -> None:
    """V26: unless the script has decided that."""
    profile = read_profile(folder)
    kinds = tuple(
        msgspec.structs.replace(
            kind,
            sizes=tuple(
                msgspec.structs.replace(s, activation_bytes=1 << 20, working_bytes=0) for s in kind.sizes
            ),
        )
        for kind in profile.kinds
    )
    tight = msgspec.structs.replace(profile, kinds=kinds, fixed_bytes=0, device_memory_bytes=9 << 20)
    (tmp_path / NAME).write_text(encode(tight))
    options: dict[str, Any] = {"profile_folder": tmp_path, "schedule": "gpipe"}
    assert [stage.recompute for stage in wrap(**options).plan.stages] == [True]
    with pytest.raises(PlanError, match="too little"):
        wrap(**options, recompute=False)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"fingerprint": "abc"}, "another model: abc, but here it is [0-9a-f]"),
        ({"precision": "bf16"}, "another precision: bf16, but here it is fp32"),
        ({"device": "an abacus"}, "another device: an abacus, but here it is cpu"),
    ],
)
def test_a_profile_of_something_else_is_refused_by_name(
    folder: Path, tmp_path: Path, changes: dict[str, str], complaint: str
) -> None:
    """V26"""
    (tmp_path / NAME).write_text(encode(msgspec.structs.replace(read_profile(folder), **changes)))
    with pytest.raises(PlanError, match=complaint):
        wrap(profile_folder=tmp_path)


def test_a_profile_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_PROFILE", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="there is no profile"):
        wrap()


# ---------------------------------------------------------------- a plan

MEMORY = MemoryForecast(0, 0, 0, 0, 0, 0, 0, 0)


def proposal(**changes: Any) -> Proposal:
    stages = (StagePlan(0, 3, (0,), True), StagePlan(3, 4, (1,)))
    plan = Plan(**({"stages": stages, "batch_size": 4, "microbatch_size": 1, "schedule": "1f1b"} | changes))
    forecast = Forecast(1000.0, tuple(StageForecast(900.0, 100.0, 0.0, 0.0, MEMORY) for _ in plan.stages))
    return Proposal(plan, forecast, (), "the shortest step of all layouts")


def test_what_the_script_leaves_open_is_the_plans(pool: Pool) -> None:
    """V27: what the script gives wins."""
    plans = pool.run(planned, 2, encode(proposal()))[0]
    assert [spans(plan) for plan in plans] == [[(0, 3), (3, 4)], [(0, 1), (1, 4)]]
    assert [[stage.recompute for stage in plan.stages] for plan in plans] == [[True, False], [False, False]]
    assert [plan.schedule for plan in plans] == ["1f1b", "gpipe"]


def planned(text: str) -> list[Plan]:
    plans = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VARUNA_PLAN", text)
        for given in ({}, {"schedule": "gpipe", "recompute": False, "spans": [(0, 1), (1, 4)]}):
            model = wrap("0;1;", **given)
            plans.append(model.plan)
            model.close()
    return plans


def test_a_script_that_disagrees_with_the_plan_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V27"""
    monkeypatch.setenv("VARUNA_PLAN", encode(proposal(stages=(StagePlan(0, 4, (0,)),))))
    with caplog.at_level(logging.INFO, logger="varuna"):
        wrap(schedule="gpipe")
    assert "using schedule=gpipe of the script instead of 1f1b of the plan" in caplog.text


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"fingerprint": "abc"},
            r"for the model abc, but this one is [0-9a-f]+ \(profile and plan",
        ),
        ({"precision": "bf16"}, "for bf16, but the model is wrapped in fp32"),
        ({}, "places ranks as '0;1;', but the model is wrapped with the map '0;'"),
        (
            {"stages": (StagePlan(0, 7, (0,)),)},
            "ranges that cover segments 0 to 3",
        ),
    ],
)
def test_a_plan_for_something_else_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], complaint: str
) -> None:
    """V27"""
    monkeypatch.setenv("VARUNA_PLAN", encode(proposal(**changes)))
    with pytest.raises(ValueError, match=complaint):
        wrap()


def test_a_plan_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_PLAN", "{ half")
    with pytest.raises(ValueError, match="VARUNA_PLAN is not a valid Proposal"):
        wrap()


# ---------------------------------------------------------------- what was foretold


def trained(model: Varuna, steps: int) -> Varuna:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer(optimizer)
    for _ in range(steps):
        model.step(get_batch(4))
        optimizer.step()
        model.zero_grad()
    return model


def test_a_report_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEE: it is written within a step."""
    waits: list[int] = []
    monkeypatch.setattr(os, "fsync", waits.append)
    times = (0.04, 0.03, 0.01, 0.02)
    forecast = Forecast(0.1, (StageForecast(*times, MemoryForecast(*[2**20] * 8)),))
    timeline = Timeline((Interval(0, 0, "F", 0, 0.0, 1.0),))
    prediction = Prediction(forecast, lambda: timeline)
    session: Any = None  # not used
    reporter = Reporter(session, [], prediction, reports=True, folder=str(tmp_path))
    reporter._write(StepReport(10, 7, 0.12, (StageTime(*times),), forecast), timeline, tmp_path)
    names = {"report.json", "timeline.json", "timeline.svg", "timeline.perfetto.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert waits == []


def test_a_report_tells_predicted_and_measured_and_a_profile_foretells_what_is_run(
    pool: Pool, folder: Path, tmp_path: Path
) -> None:
    """V28, B4: the same on all ranks; by the profile, whatever schedule the script has chosen."""
    reports = [decode(text, msgspec.Raw) for text in pool.run(reported, 2, str(folder), str(tmp_path))]
    assert reports[0] == reports[1]
    written = msgspec.json.decode((tmp_path / "report.json").read_bytes())
    assert (written["step"], written["num_steps"], len(written["stages"])) == (10, 6, 2)
    # Four forwards toil, no backward does, and only on the first stage.
    assert written["seconds"] > 4 * SECONDS
    measured, predicted = (
        stages[0]["compute_seconds"] for stages in (written["stages"], written["forecast"]["stages"])
    )
    assert measured > 4 * SECONDS and predicted > 4 * SECONDS
    picture = (tmp_path / "timeline.svg").read_text()
    assert picture.index("predicted: ") < picture.index("measured: ")
    events = msgspec.json.decode((tmp_path / "timeline.perfetto.json").read_bytes())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"{what} stage {r}, rank {r}" for what in ("predicted", "measured") for r in (0, 1)]


def reported(folder: str, logs: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VARUNA_LOG_DIR", logs)
        model = trained(wrap("0;1;", profile_folder=folder, schedule="gpipe"), 10)
    report = encode(model.report())
    model.close()
    return report


def test_without_a_forecast_a_report_tells_what_was_measured_and_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """V28"""
    monkeypatch.setenv("VARUNA_LOG_DIR", str(tmp_path))
    model = wrap()
    with pytest.raises(RuntimeError, match="no step has been measured yet, after 0 steps"):
        model.report()
    report = trained(model, 10).report()
    assert report.forecast is None and report.seconds > 4 * SECONDS
    names = {path.name for path in tmp_path.iterdir()}
    # A thread writes the metrics after a second.
    assert names - {"metrics.jsonl", "run"} == {"timeline.json", "rank_0.trace"}
    assert capsys.readouterr() == ("", "")


def test_a_step_far_from_its_forecast_is_a_warning_that_names_the_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V28: beyond a tenth. Here the plan's own forecast is told, for there is no profile."""
    plan = proposal(stages=(StagePlan(0, 4, (0,)),))
    monkeypatch.setenv("VARUNA_PLAN", encode(plan))
    with caplog.at_level(logging.INFO, logger="varuna"):
        report = trained(wrap(), 10).report()
    assert report.forecast == plan.forecast
    assert "1000 s predicted (-100.0%)" in caplog.text
    assert "less than the predicted 1000 s; largest difference: stage 0, computing takes" in caplog.text


def test_a_forecast_is_not_told_of_a_plan_that_is_not_run_as_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VARUNA_PLAN", encode(proposal(stages=(StagePlan(0, 4, (0,)),))))
    assert trained(wrap(schedule="gpipe"), 5).report().forecast is None


@pytest.mark.parametrize("between", ["evaluation", "checkpoint", "report"])
def test_what_comes_between_two_steps_now_and_then_is_no_part_of_them(tmp_path: Path, between: str) -> None:
    """V28"""
    model = trained(wrap(), 6)
    before = model.report()
    model.step(get_batch(4))
    if between == "evaluation":
        model.evaluate(get_batch(4))
    elif between == "checkpoint":
        model.checkpoint(tmp_path)
    else:
        model.report()
    model.step(get_batch(4))
    assert model.report().num_steps == before.num_steps


def test_a_script_that_evaluates_after_every_step_goes_without_reports(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """V28: no length of a step is known, and training goes on."""
    monkeypatch.setenv("VARUNA_PLAN", encode(proposal(stages=(StagePlan(0, 4, (0,)),))))
    model = wrap()
    model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.INFO, logger="varuna"):
        for _ in range(10):
            model.step(get_batch(1))
            model.evaluate(get_batch(1))
    assert "predicted" not in caplog.text
