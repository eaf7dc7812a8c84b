"""`varuna plan`, `explain` and `simulate` on hand-made profiles."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cli.commands import Cli
from tests.plan.profiles import GB, MB, profile, reductions, segment, transformer
from tests.without_torch import run_without_torch
from varuna.codec import encode
from varuna.plan.cluster_file import read_cluster
from varuna.plan.plan_file import read_plan
from varuna.plan.search.search import other_depths, search
from varuna.plan.tables import gains, spans
from varuna.types import Duration, Profile


class Planner(Cli):
    """Runs planning commands on a profile in a temporary folder."""

    def __init__(self, folder: Path, *more: Any) -> None:
        super().__init__(*more)
        self.folder = folder
        self.keep(profile([segment(1e-3)], [0] * 4))

    def keep(self, made: Profile) -> None:
        (self.folder / "profile.json").write_text(encode(made))

    def run(self, *arguments: object) -> str:
        assert self(*arguments) == 0, self.err
        return self.out

    def load(self, *arguments: object) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def refuse(self, *arguments: object) -> str:
        """Return the one-line error of a command that exits with status 2."""
        assert self(*arguments) == 2 and self.out == ""
        assert self.err.startswith("varuna: ") and self.err.count("\n") == 1
        return self.err.removeprefix("varuna: ").strip()

    def plan(self, name: str, *more: object, devices: int = 4) -> Path:
        """Write a plan for 4 devices, 2 per machine, by default."""
        file = self.folder / name
        given = ["--devices", devices, "--per-machine", 2, "--batch-size", 32]
        self.run("plan", self.folder, *given, "--out", file, *more)
        return file


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Planner:
    return Planner(tmp_path, monkeypatch, capsys)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# ---------------------------------------------------------------- plan


def test_plan_shows_stages_runners_up_and_why_they_are_slower(planner: Planner) -> None:
    """B3: each stage's time, memory, bubble; the runners-up and why they lost."""
    shown = planner.run("plan", planner.folder, "--devices", 4, "--per-machine", 2, "--batch-size", 32)
    assert shown.startswith("4 devices on 2 machines, batches of 32, bf16 on an abacus\n")
    assert shown.count("the shortest step of all layouts") == 1 and "% slower: " in shown
    assert [row[:3] for row in rows(shown) if row[:1] == ["stage"]] == [["stage", "segments", "ranks"]]
    assert {"compute", "waiting", "all-reduce", "optimizer", "bubble", "memory"} <= {*shown.split()}


def test_a_runner_up_is_the_best_layout_of_its_depth(planner: Planner) -> None:
    """B3: a runner-up is not slower because the search stopped early. Layouts that are barely faster, by
    unequal replicas alone, are not shown."""
    made = transformer(24)
    planner.keep(made)
    ranking = planner.load("plan", planner.folder, "--devices", 16, "--batch-size", 512, "--headroom", 0)
    shown = {len(p["plan"]["stages"]): p["forecast"]["seconds"] for p in ranking["proposals"]}
    best = min(shown, key=shown.__getitem__)
    assert list(shown.values()) == sorted(shown.values()) and len(shown) > 3
    assert {best * 2, best + 1} <= {*shown}
    cluster = read_plan(_pin(planner)).cluster
    assert cluster is not None
    for depth, seconds in shown.items():
        apart = [
            way.forecast.seconds for way in search(made, cluster, batch_size=512, depths=[depth]).proposals
        ]
        assert seconds == pytest.approx(min(way for way in apart if way >= shown[best]), rel=1e-9)


def _pin(planner: Planner) -> Path:
    file = planner.folder / "plan.json"
    given = ["--devices", 16, "--batch-size", 512, "--runners-up", 0]
    planner.run("plan", planner.folder, *given, "--out", file)
    return file


def test_runners_up_have_depths_near_the_best_its_double_and_its_half() -> None:
    assert other_depths(4, [6, 1], range(1, 9)) == [6, 8, 2, 5, 3, 1]
    assert other_depths(1, [], range(1, 9)) == [2, 4, 3]
    assert other_depths(1, [], range(1, 2)) == []
    assert other_depths(2, [4], [2, 4]) == [4]


def test_several_numbers_of_devices_are_compared(planner: Planner) -> None:
    """Step time, throughput, gain and efficiency by number of devices."""
    given = ["plan", planner.folder, "--per-machine", 2, "--batch-size", 64]
    shown = planner.run(*given, "--devices", "1,2,4,8")
    head, *table = rows(shown)[:5]
    assert head == [
        *("devices", "machines", "stages", "replicas", "micro-batch", "schedule", "a", "step"),
        *("samples/s", "gain", "efficiency", "idle"),
    ]
    assert [row[:2] for row in table] == [["1", "1"], ["2", "1"], ["4", "2"], ["8", "4"]]
    assert table[0][-3:] == ["-", "100%", "0"] and table[1][-3].startswith("+")
    points = planner.load(*given, "--devices", "1,8")
    alone = planner.load(*given, "--devices", 8)["proposals"][0]
    assert points[1]["best"]["forecast"] == alone["forecast"]
    assert points[1]["samples_per_second"] == pytest.approx(64 / alone["forecast"]["seconds"])
    assert points[1]["efficiency"] == pytest.approx(
        points[1]["samples_per_second"] / 8 / points[0]["samples_per_second"]
    )


def test_a_number_of_devices_that_is_too_small_is_shown_among_the_others(planner: Planner) -> None:
    planner.keep(profile([segment(1e-3, parameter_bytes=GB)], [0] * 4))
    given = ["plan", planner.folder, "--memory", "9GiB", "--batch-size", 8, "--devices"]
    shown = planner.run(*given, "1,4")
    assert ["1", "1", *"---------"] in rows(shown) and "1 device: no layout fits: " in shown
    assert planner.load(*given, "1,4")[0]["best"] is None
    assert "no layout fits" in planner.refuse(*given, "1,2", "--memory", "5GiB")
    assert gains([2.0, None, 3.0, 6.0]) == ["-", "-", "-", "+100.0%"]


def test_options_restrict_the_search(planner: Planner) -> None:
    wishes = ["--stages", "2,4", "--chunk-size", 1, "--schedule", "1f1b,gpipe", "--recompute"]
    best = read_plan(planner.plan("plan.json", *wishes, "--runners-up", 0))
    assert best.plan.depth in (2, 4) and best.plan.microbatch_size == 1 and not best.runners_up
    assert best.plan.schedule in ("1f1b", "gpipe") and all(stage.recompute for stage in best.plan.stages)
    assert not read_plan(planner.plan("whole.json")).shard_optimizer
    assert read_plan(planner.plan("sharded.json", "--shard-optimizer")).shard_optimizer


def test_plan_for_less_memory_or_another_network(planner: Planner) -> None:
    planner.keep(profile([segment(1e-3, parameter_bytes=GB)], [0] * 4))
    roomy = read_plan(planner.plan("roomy.json", "--stages", "1,2,4"))
    tight = read_plan(planner.plan("tight.json", "--memory", "6GiB"))
    assert all(stage.memory.total <= 6 * GB for stage in tight.forecast.stages)
    assert any("too little" in why for why in tight.refused)
    slow = read_plan(planner.plan("slow.json", "--network", "100Mbit", "--latency", "1ms"))
    assert slow.network is not None and slow.network.bytes_per_second == 12.5e6
    assert slow.forecast.seconds > roomy.forecast.seconds
    assert "the network between machines is assumed: 0.1 Gbit/s, 1000 µs" in slow.forecast.estimates


def test_refused_layouts_and_estimates_are_shown(planner: Planner) -> None:
    """V25: infeasible layouts are reported; what was not measured is a stated estimate."""
    planner.keep(
        profile(
            [segment(1e-3, parameter_bytes=GB)],
            [0] * 4,
            reduce_costs=reductions(50e9, between=False),
        )
    )
    given = ["plan", planner.folder, "--devices", 4, "--per-machine", 2, "--batch-size", 32, "--stages", 2]
    shown = planner.run(*given, "--memory", "12GiB")
    assert "note: the all-reduce between machines is estimated from the link between two workers" in shown
    shown = planner.run(*given[:-1], "1,2,4", "--memory", "12GiB")
    assert "refused: 1 stage: stage 0 needs at least 16 GiB, but a device has 11.4 GiB: 4.6 GiB" in shown


# ---------------------------------------------------------------- machines that differ

CLUSTER: dict[str, Any] = {
    "machines": [
        {"name": "big", "count": 2, "devices": 2, "memory": "80GiB", "cards": 2},
        {"name": "old", "devices": 4, "memory": "16GiB", "speed": 0.5},
    ]
}


def write(file: Path, content: object) -> Path:
    file.write_text(json.dumps(content))
    return file


def test_a_cluster_file_describes_machines_of_unequal_speed_and_memory(planner: Planner) -> None:
    file = write(planner.folder / "cluster.json", CLUSTER)
    pinned = planner.folder / "plan.json"
    shown = planner.run(
        "plan", planner.folder, "--cluster", file, "--batch-size", 32, "--stages", 4, "--out", pinned
    )
    assert shown.startswith("8 devices on 3 machines")
    cluster = read_plan(pinned).cluster
    assert cluster is not None
    assert [(m.name, m.devices, m.memory_bytes, m.speed, m.cards) for m in cluster.machines] == [
        ("big-0", 2, 80 * GB, 1.0, 2),
        ("big-1", 2, 80 * GB, 1.0, 2),
        ("old", 4, 16 * GB, 0.5, 1),
    ]
    assert read_plan(pinned).idle == ("old:0", "old:1", "old:2", "old:3")  # they would slow down the rest


def test_a_cluster_file_may_describe_the_network_and_omit_the_memory(tmp_path: Path) -> None:
    content = {"network": "10Gbit", "latency": "50us", "machines": [{"name": "a", "devices": 8}]}
    cluster, network = read_cluster(write(tmp_path / "c.json", content), memory_bytes=GB)
    assert network is not None and network.bytes_per_second == 1.25e9
    assert network.latency_seconds == pytest.approx(50e-6)
    assert [machine.memory_bytes for machine in cluster.machines] == [GB]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"machines": []}, "length >= 1 - at `$.machines`"),
        ({"machines": [{"name": "a", "devices": 0}]}, ">= 1 - at `$.machines[0].devices`"),
        ({"machines": [{"name": "a", "devices": 1, "speed": -1}]}, "> 0.0 - at `$.machines[0].speed`"),
        ({"machines": [{"name": "a", "devices": 1, "count": 0}]}, ">= 1 - at `$.machines[0].count`"),
        ({"machines": [{"name": "a", "devices": 1, "gpus": 2}]}, "unknown field `gpus`"),
        (
            {"machines": [{"name": "a", "devices": 1, "memory": "80"}]},
            "`machines[0].memory` '80' must be a number above zero with one of the units GiB",
        ),
        ({"machines": [{"name": "a", "devices": 1}] * 2}, "gives two machines one name"),
        ({"machines": [{"name": "a", "devices": 1 << 20, "count": 2}]}, "2097152 devices are too many"),
        ({"network": "fast"}, "network 'fast' must be a number above zero with one of the units Gbit"),
        ({"latency": "5us"}, "latency needs "),
    ],
)
def test_an_invalid_cluster_file_is_refused_with_the_key(
    planner: Planner, change: dict[str, object], shown: str
) -> None:
    file = write(planner.folder / "cluster.json", CLUSTER | change)
    refused = planner.refuse("plan", planner.folder, "--cluster", file, "--batch-size", 8)
    assert shown in refused and str(file) in refused


def test_a_cluster_is_given_exactly_once(planner: Planner) -> None:
    file = write(planner.folder / "cluster.json", CLUSTER)
    given = ["plan", planner.folder, "--batch-size", 8]
    assert "exclude each other" in planner.refuse(*given, "--cluster", file, "--devices", 8)
    assert "give --devices (such as" in planner.refuse(*given)
    assert "there is no cluster file" in planner.refuse(*given, "--cluster", planner.folder / "nowhere")
    assert "is a folder" in planner.refuse(*given, "--cluster", planner.folder)
    file.write_text(file.read_text()[:40])
    assert "cluster.json is not a valid ClusterFile: Input data was truncated" in planner.refuse(
        *given, "--cluster", file
    )


# ---------------------------------------------------------------- explain


def test_explain_shows_a_plan_and_its_runners_up(planner: Planner) -> None:
    """B3"""
    pinned = planner.plan("plan.json")
    given = ["plan", planner.folder, "--devices", 4, "--per-machine", 2, "--batch-size", 32]
    planned, explained = planner.run(*given), planner.run("explain", pinned)
    assert {line for line in planned.splitlines()[1:]} <= {*explained.splitlines()}
    assert "parameters  gradients" in explained
    assert planner.load("explain", pinned) == json.loads(pinned.read_text())


def test_explain_shows_the_differences_of_two_plans(planner: Planner) -> None:
    """B3: JSON, with a diff."""
    one = planner.plan("one.json", "--schedule", "1f1b", "--stages", 2)
    other = planner.plan("other.json", "--schedule", "1f1b", "--stages", 4)
    shown = planner.run("explain", one, "--diff", other)
    assert {"stages: 2 -> 4", "replicas: 2 -> 1", "cuts before: 2 -> 1 to 3"} <= {*shown.splitlines()}
    assert "schedule" not in shown and "a step: " in shown
    assert {"what": "stages", "here": "2", "there": "4"} in planner.load("explain", one, "--diff", other)
    assert planner.run("explain", one, "--diff", one) == "the plans are the same\n"
    assert "is a profile" in planner.refuse("explain", planner.folder, "--diff", one)


def test_explain_shows_a_profile_and_its_missing_measurements(planner: Planner) -> None:
    """V24: what is in it, and what is not."""
    made = profile(
        [segment(1e-3, parameter_bytes=8 * MB), segment(2e-3)],
        [0, 1, 1, 1],
        between=None,
        reduce_costs=reductions(50e9, between=False),
        notes=("micro-batch size 8: out of memory",),
    )
    size = made.kinds[0].sizes[0]
    noisy = msgspec.structs.replace(size, forward=Duration(1e-3, 1e-4))
    kinds = (
        msgspec.structs.replace(made.kinds[0], sizes=(noisy, *made.kinds[0].sizes[1:])),
        made.kinds[1],
    )
    planner.keep(msgspec.structs.replace(made, kinds=kinds))
    shown = planner.run("explain", planner.folder)
    assert shown.startswith(
        "4 segments of 2 kinds, 20 MiB of weights, in bf16 on an abacus with 80 GiB; model"
    )
    table = [row for row in rows(shown) if row[:2] in (["0", "0"], ["1", "1"])]
    assert table[0][:8] == ["0", "0", "8", "MiB", "1", "1", "ms", "±"] and table[0][8] == "10%"
    assert table[1][:5] == ["1", "1", "to", "3", "4"]
    assert "link between machines: not measured" in shown
    assert "all-reduce between machines: not measured" in shown
    assert "not measured: micro-batch size 8: out of memory" in shown
    assert "over 2, 4, 8 ranks" in shown
    assert planner.load("explain", planner.folder / "profile.json")["device"] == "an abacus"


def test_many_numbers_are_shown_as_ranges() -> None:
    assert spans([0, 1, 2, 3, 7, 8, 10]) == "0 to 3, 7, 8, 10"
    assert spans([0, 2, 4, 6, 8]) == "0, 2, 4, 6, ..."
    assert spans([]) == ""


# ---------------------------------------------------------------- simulate


def test_a_plan_is_simulated_as_planned(planner: Planner) -> None:
    """B4: the predicted timeline, as text, picture and trace. With a device left idle in the middle."""
    given = ("--stages", 3, "--chunk-size", "1,2,4")  # else one stage would get the idle device
    pinned = planner.plan("plan.json", *given)
    assert read_plan(pinned).idle
    picture, trace = planner.folder / "a.svg", planner.folder / "trace.json"
    shown = planner.run("simulate", planner.folder, pinned, "--svg", picture, "--perfetto", trace)
    assert "stage 2, rank 2 |" in shown and "planned:" not in shown and "samples/s" in shown
    assert picture.read_text().startswith("<svg") and "3 stages x 1 replica" in picture.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert planner.load("simulate", planner.folder, pinned) == json.loads(encode(read_plan(pinned).forecast))
    same = planner.folder / "same.svg"
    planner.plan("again.json", *given, "--svg", same)
    assert same.read_text() == picture.read_text()


def test_trace_is_an_input_and_perfetto_an_output(planner: Planner) -> None:
    pinned, file = planner.plan("plan.json"), planner.folder / "trace.json"
    refused = planner.refuse("simulate", planner.folder, pinned, "--trace", file)
    assert "plays a trace of machines, without PLAN" in refused and "give --perfetto FILE" in refused
    assert "--perfetto draws a step of a plan" in planner.refuse("simulate", "--perfetto", file)
    assert not file.exists()


def test_a_plan_is_simulated_on_another_cluster(planner: Planner) -> None:
    pinned = planner.plan("plan.json", "--stages", 4, "--network", "1Gbit")
    play = ["simulate", planner.folder, pinned]
    assert planner.load(*play)["seconds"] == read_plan(pinned).forecast.seconds
    quick = planner.load(*play, "--network", "400Gbit")["seconds"]
    together = planner.load(*play, "--devices", 4, "--per-machine", 4)["seconds"]
    assert together < quick < read_plan(pinned).forecast.seconds
    shown = planner.run(*play, "--network", "1Mbit", "--latency", "1ms")
    assert "; planned: " in shown and "note: the network between machines is assumed: 0.001 Gbit/s" in shown
    file = write(planner.folder / "cluster.json", CLUSTER)
    assert planner.load(*play, "--cluster", file)["seconds"] > 0


def test_the_seed_determines_the_jitter(planner: Planner) -> None:
    """V23"""
    size = segment(1e-3).sizes[0]
    noisy = msgspec.structs.replace(size, forward=Duration(1e-3, 3e-4), backward=Duration(2e-3, 5e-4))
    planner.keep(profile([msgspec.structs.replace(segment(1e-3), sizes=(noisy,))], [0] * 4))
    pinned = planner.plan("plan.json", "--stages", 4, "--schedule", "1f1b")
    play = ["simulate", planner.folder, pinned]
    calm, one, again, other = (planner.load(*play, "--seed", seed)["seconds"] for seed in (0, 7, 7, 8))
    assert one == again != other and calm not in (one, other)


def test_a_plan_that_does_not_match_the_profile_or_cluster_is_refused(planner: Planner) -> None:
    """A plan for more devices, another model, another precision or more memory than there is."""
    pinned = planner.plan("plan.json", "--stages", 4)
    play = ["simulate", planner.folder, pinned]
    assert "the plan has 4 ranks, but only 2 devices are available" in planner.refuse(*play, "--devices", 2)
    assert planner.refuse(*play, "--memory", "8MiB").startswith("the plan does not fit: stage ")
    assert "--seed must be 0 to 2147483647, not -1" in planner.refuse(*play, "--seed", -1)
    planner.keep(profile([segment(1e-3)], [0] * 4, fingerprint="another"))
    assert "the plan is for model by hand, but the profile is of another" in planner.refuse(*play)
    planner.keep(profile([segment(1e-3)], [0] * 4, precision="fp32"))
    assert "the plan runs in bf16, but the profile was measured in fp32" in planner.refuse(*play)
    planner.keep(profile([segment(1e-3)], [0] * 3))
    assert "the plan has 4 segments, but the profile has 3" in planner.refuse(*play)
    assert "there is no plan" in planner.refuse("simulate", planner.folder, planner.folder / "nowhere.json")


# ---------------------------------------------------------------- invalid input


@pytest.mark.parametrize(
    ("option", "wrong", "shown"),
    [
        ("--devices", "0", "--devices must be 1 or more, not 0"),
        ("--devices", "-3", "--devices must be 1 or more, not -3"),
        ("--devices", "8,0", "--devices must be 1 or more, not 0"),
        ("--devices", "many", "--devices 'many' must be whole numbers separated by commas"),
        ("--devices", "1.5", "--devices '1.5' must be whole numbers"),
        ("--devices", str(10**12), "--devices: 1000000000000 devices are too many"),
        ("--per-machine", "0", "--per-machine must be 1 or more, not 0"),
        ("--batch-size", "0", "--batch-size must be 1 to 1048576, not 0"),
        ("--batch-size", str(10**15), "--batch-size must be 1 to 1048576, not 1000000000000000"),
        ("--memory", "80 apples", "--memory '80 apples' must be a number above zero with one of the units G"),
        ("--memory", "0GiB", "--memory '0GiB' must be a number above zero"),
        ("--memory", "-1GiB", "--memory '-1GiB' must be a number above zero"),
        ("--memory", "1.2.3GiB", "--memory '1.2.3GiB' must be a number above zero"),
        ("--network", "25Gb", "--network '25Gb' must be a number above zero with one of the units Gbit,"),
        ("--latency", "5us", "--latency needs --network as well: the bandwidth, such as 25Gbit"),
        ("--schedule", "2f2b", "there is no schedule '2f2b' (choose one of varuna, 1f1b"),
        ("--stages", "9", "9 stages were requested, but the model has 4 segments and so allows 1 to 4"),
        ("--stages", "0", "--stages must be 1 or more, not 0"),
        ("--chunk-size", "64", "micro-batches of 64 were requested, but the profile covers 1 to 4"),
        (
            "--headroom",
            "1.5",
            "share of a device's memory to leave free, from 0 to below 1, not 1.5",
        ),
        (
            "--headroom",
            "nan",
            "share of a device's memory to leave free, from 0 to below 1, not nan",
        ),
        ("--runners-up", "-1", "--runners-up must be 0 to 100, not -1"),
    ],
)
def test_invalid_options_are_refused_with_their_name(
    planner: Planner, option: str, wrong: str, shown: str
) -> None:
    given = {"--devices": "4", "--batch-size": "8"} | {option: wrong}
    assert shown in planner.refuse("plan", planner.folder, *(text for pair in given.items() for text in pair))


def test_out_and_svg_need_one_plan(planner: Planner) -> None:
    given = [
        "plan",
        planner.folder,
        "--devices",
        "2,4",
        "--batch-size",
        8,
        "--svg",
        planner.folder / "x.svg",
    ]
    assert "--out and --svg need one plan" in planner.refuse(*given)


def test_an_infeasible_request_says_which_limit_by_how_much_and_what_would_fit(planner: Planner) -> None:
    """V25"""
    planner.keep(profile([segment(1e-3, parameter_bytes=GB)], [0] * 4))
    refused = planner.refuse("plan", planner.folder, "--devices", 2, "--batch-size", 8, "--memory", "5GiB")
    assert (
        "needs 8 GiB and the device has 4.75 GiB, 3.25 GiB too little (with 2 more devices, 4 st" in refused
    )


def test_a_link_that_was_not_measured_is_requested(planner: Planner) -> None:
    """V25: a missing measurement is an error that says how to add it. Assumptions are shown."""
    planner.keep(
        profile(
            [segment(1e-3)],
            [0] * 4,
            between=None,
            reduce_costs=reductions(50e9, between=False),
            notes=("between: all processes ran on one machine",),
        )
    )
    given = ["plan", planner.folder, "--devices", 4, "--per-machine", 2, "--batch-size", 32]
    assert planner.refuse(*given) == (
        "the profile has no link between machines, and there are 2 machines (describe the network: "
        "--network 25Gbit --latency 20us; or profile with workers on two machines)"
    )
    shown = planner.run(*given, "--network", "25Gbit")
    assert "the network between machines is assumed: 25 Gbit/s, 20 µs" in shown
    shown += planner.run("plan", planner.folder, "--devices", 4, "--per-machine", 4, "--batch-size", 32)
    assert "ran on one machine" not in shown
    planner.keep(profile([segment(1e-3)], [0] * 4, within=None))
    assert "no link within a machine" in planner.refuse(*given)


def test_an_invalid_profile_is_refused(planner: Planner) -> None:
    """A missing profile, another version, a truncated file, another kind of file."""
    given = ["--devices", 4, "--batch-size", 32]
    empty = planner.folder / "empty"
    empty.mkdir()
    assert "there is no profile" in planner.refuse("plan", empty, *given)
    assert "there is no profile" in planner.refuse("explain", empty)
    (empty / "profile.unfinished.json").write_text("{}")
    assert "only an unfinished one (run the Profiler again" in planner.refuse("plan", empty, *given)
    file = planner.folder / "profile.json"
    whole = file.read_text()
    file.write_text(whole.replace('"version": 1', '"version": 7'))
    assert "version is 7, this library reads 1 (profile the model again)" in planner.refuse(
        "plan", planner.folder, *given
    )
    file.write_text(whole[: whole.rindex(",", 0, len(whole) // 2)])
    assert "profile.json is not a valid Profile: Input data was truncated" in planner.refuse(
        "plan", planner.folder, *given
    )
    file.write_bytes(b"\x80\x81")
    assert "profile.json is not a valid Profile: " in planner.refuse("plan", planner.folder, *given)
    assert "is not a valid PinnedPlan" in planner.refuse("explain", file)
    file.write_text('{"colour": "blue"}')
    assert "valid PinnedPlan: Object missing required field `plan`" in planner.refuse("explain", file)


# ---------------------------------------------------------------- without torch


def test_planning_explaining_and_simulating_import_no_torch(planner: Planner) -> None:
    folder, pinned = planner.folder, planner.folder / "plan.json"
    given = ["--devices", "4", "--batch-size", "16"]
    commands = [
        ["plan", str(folder), *given, "--out", str(pinned), "--svg", str(folder / "x.svg")],
        ["plan", str(folder), "--devices", "2,4", "--batch-size", "16"],
        ["explain", str(pinned)],
        ["explain", str(pinned), "--diff", str(pinned)],
        ["explain", str(folder)],
        ["simulate", str(folder), str(pinned), "--perfetto", str(folder / "trace.json")],
        ["profile", "--help"],
    ]
    run_without_torch(commands)


# ---------------------------------------------------------------- the document


def test_the_commands_in_the_docs_print_what_the_docs_show(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs or is refused as shown. The numbers are from another machine."""
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    monkeypatch.chdir(planner.folder)
    (planner.folder / "profiles").mkdir()
    hidden = profile(
        [segment(2e-3, sizes=(1, 2, 4, 8))], [0] * 12, between=None, fixed_bytes=229 * MB, precision="fp32"
    )
    (planner.folder / "profiles" / "profile.json").write_text(encode(hidden))
    (planner.folder / "cluster.json").write_text(text.split("```json\n")[1].split("```")[0])
    shown = re.findall(r"^\$ varuna ((?:plan|explain|simulate) .*)\n(.*)", text, re.MULTILINE)
    assert len(shown) == 7
    for command, answer in shown:
        refused = answer.startswith("varuna: ")
        assert planner(*command.split()) == (2 if refused else 0), (command, planner.err)
        shown = (planner.err if refused else planner.out).splitlines()[0]
        assert re.findall(r"[a-z]+", shown)[:2] == re.findall(r"[a-z]+", answer)[:2]
