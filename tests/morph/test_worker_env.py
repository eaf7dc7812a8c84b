"""Ranks of machines, and flags and environment variables of workers."""

import argparse
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.cli.launch import choose_flags
from varuna.morph.protocol.messages import MorphWorkers
from varuna.morph.run.script_flags import lacking_flags, offer_flags
from varuna.morph.run.worker_env import (
    WORKER_FLAGS,
    accepted_flags,
    make_orders,
    name_idle_devices,
    ranks_of_machine,
    ranks_of_machines,
    worker_arguments,
    worker_environment,
)
from varuna.plan.search.choose import lay_out
from varuna.types import JobSpec, Layout, MachineWorkers, format_stage_map, spread_evenly


@given(batch=st.integers(1, 10_000), replicas=st.integers(1, 64))
def test_batches_of_replicas_sum_to_the_global_batch_and_differ_by_at_most_one(
    batch: int, replicas: int
) -> None:
    shares = spread_evenly(batch, parts=replicas)
    assert sum(shares) == batch
    assert max(shares) - min(shares) <= 1


@given(devices=st.integers(1, 64), stages=st.integers(1, 64))
def test_every_rank_has_one_stage_and_replica_and_other_devices_are_idle(devices: int, stages: int) -> None:
    """V32"""
    if stages > devices:
        with pytest.raises(ValueError, match=f"need {stages}, there are {devices}"):
            lay_out(devices, stages, batch_size=64, microbatch_size=1)
        return
    layout = lay_out(devices, stages, batch_size=64, microbatch_size=1)
    places = [layout.place(rank) for rank in range(layout.num_ranks)]
    assert places == [(rank % stages, rank // stages) for rank in range(layout.num_ranks)]
    assert [*range(layout.num_ranks), *layout.idle] == list(range(devices))
    assert len(layout.idle) == devices % stages


@given(machines=st.integers(1, 12), devices=st.integers(1, 4), data=st.data())
def test_ranks_number_the_used_devices_of_all_machines_in_order(
    machines: int, devices: int, data: st.DataObject
) -> None:
    """V32: idle devices may be anywhere."""
    everything = range(machines * devices)
    idle = data.draw(st.sets(st.sampled_from(everything), max_size=len(everything) - 1))
    used = [device for device in everything if device not in idle]
    layout = Layout((tuple(range(len(used))),), len(used), 1, tuple(sorted(idle)))
    expected = tuple(
        tuple(rank for rank, device in enumerate(used) if device // devices == machine)
        for machine in range(machines)
    )
    assert ranks_of_machines(layout, machines, devices_per_machine=devices) == expected
    alone = [ranks_of_machine(layout, machine, devices_per_machine=devices) for machine in range(machines)]
    assert tuple(alone) == expected


def test_a_layout_formats_its_stage_map_and_sizes() -> None:
    layout = lay_out(4, 2, batch_size=7, microbatch_size=2)
    assert format_stage_map(layout.stage_map) == "0,2;1,3;"
    assert str(layout) == "2 stages x 2 replicas, batch 7 in micro-batches of 2"


def test_idle_devices_are_named_by_machine() -> None:
    """V32"""
    layout = lay_out(8, 3, batch_size=6, microbatch_size=2)
    assert name_idle_devices(layout, devices_per_machine=4) == "machine 1: devices 2, 3"
    assert ranks_of_machine(layout, 1, devices_per_machine=4) == (4, 5)


def test_fewer_replicas_can_be_requested() -> None:
    layout = lay_out(8, 2, batch_size=6, microbatch_size=2, num_replicas=3)
    assert (layout.depth, layout.widths, layout.idle) == (2, (3, 3), (6, 7))


@pytest.mark.parametrize(
    ("devices", "stages", "replicas", "batch", "complaint"),
    [
        (2, 4, 0, 8, "too few devices: 4 stages x 1 replica need 4, there are 2"),
        (4, 2, 3, 8, "too few devices: 2 stages x 3 replicas need 6, there are 4"),
        (4, 1, 0, 3, "a batch of 3 leaves some of the 4 replicas without a sample"),
        (0, 1, 0, 8, "devices must be 1 or more, not 0"),
        (4, 0, 0, 8, "stages must be 1 or more, not 0"),
        (4, 2, 0, -8, "batch size must be 1 or more, not -8"),
    ],
)
def test_an_impossible_layout_is_refused(
    devices: int, stages: int, replicas: int, batch: int, complaint: str
) -> None:
    """V32"""
    with pytest.raises(ValueError, match=complaint):
        lay_out(devices, stages, batch_size=batch, microbatch_size=1, num_replicas=replicas)


def test_a_worker_gets_its_rank_and_sizes_as_flags_and_variables() -> None:
    """V30"""
    layout = lay_out(4, 2, batch_size=7, microbatch_size=2)
    job = JobSpec(
        script="/a.py",
        arguments=("--lr", "1"),
        worker_flags=WORKER_FLAGS,
        code_dir="/",
        log_dir="/logs",
        devices_per_machine=2,
    )
    second = MachineWorkers(
        job=job, layout=layout, ranks=(2, 3), master_addr="127.0.0.1", master_port=5, resume_step=12
    )
    assert worker_arguments(second, 1) == (
        "--rank=3",
        "--local_rank=1",
        "--stage_to_rank_map=0,2;1,3;",
        "--chunk_size=2",
        "--batch-size=3",
        "--resume_step=12",
        *("--lr", "1"),
    )
    first = msgspec.structs.replace(second, ranks=(0, 1), resume_step=None, environment={"PLANNED": "1"})
    assert worker_environment(first, 0) == {
        "PLANNED": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5",
        "WORLD_SIZE": "4",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "VARUNA_STAGE_TO_RANK_MAP": "0,2;1,3;",
        "VARUNA_CHUNK_SIZE": "2",
        "VARUNA_BATCH_SIZE": "7",
        "VARUNA_REPLICA_BATCH_SIZE": "4",
        "VARUNA_LOG_DIR": "/logs",
    }


def test_workers_that_are_left_on_a_machine_keep_their_devices_and_their_order() -> None:
    """HOT-3: one of three workers is lost; the next layout has two ranks here, or one."""
    job = JobSpec(script="/a.py", code_dir="/", log_dir="/logs", devices_per_machine=3)
    last = lay_out(3, 1, batch_size=12, microbatch_size=1)
    for count in (2, 1):
        layout = lay_out(count, 1, batch_size=12, microbatch_size=1)
        workers = MachineWorkers(
            job=job,
            layout=layout,
            ranks=tuple(range(count)),
            master_addr="host",
            master_port=5,
            resume_step=None,
        )
        morph = MorphWorkers(2, workers, last, (1, 2)[:count], (2,)[: 2 - count], lost=(0,), why="")
        orders = make_orders(morph, (0, 1, 2), joins=False)
        assert {old: order.rank for old, order in orders.items()} == {1: 0, 2: 1 if count == 2 else None}
        assert orders[1].environment["RANK"] == "0" and "LOCAL_RANK" not in orders[1].environment
        assert orders[1].environment["LOCAL_WORLD_SIZE"] == str(count)


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("parser.add_argument('--stage_to_rank_map'); parser.add_argument('--chunk_size')", True),
        ("parser.add_argument('--rank', help='of the low-rank adapter')", False),
        ("varuna.Varuna(model, stage_to_rank_map=os.environ['X'])  # not --stage_to_rank_map", False),
        ("this is no python", False),
    ],
)
def test_a_script_gets_the_flags_that_its_source_names(source: str, taken: bool) -> None:
    """V30"""
    assert accepted_flags(source) == ({"--stage_to_rank_map", "--chunk_size"} if taken else set())


def parser_of(*flags: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train.py")
    for flag in flags:
        parser.add_argument(flag, default="own")
    return parser


OFFERED = {"--rank": "3", "--stage_to_rank_map": "0;1;", "--chunk_size": "2"}


def test_a_parser_gets_the_flags_that_it_takes() -> None:
    """V30: whatever builds their names. Given flags and prefixes of other flags stay as they are."""
    both = parser_of("--stage_to_rank_map", "--rank", "--lr")
    assert lacking_flags(both, ["--lr", "1"], OFFERED) == ["--rank=3", "--stage_to_rank_map=0;1;"]
    assert lacking_flags(both, ["--rank=1", "--stage_to_rank_map", "0;"], OFFERED) == []
    assert lacking_flags(parser_of("--rank", "--chunk_size"), [], OFFERED) == []
    assert lacking_flags(parser_of("--stage_to_rank_map", "--rank_of_adapter"), [], OFFERED) == [
        "--stage_to_rank_map=0;1;"
    ]


def test_every_parser_of_the_process_sees_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """V30: with the command line, with given arguments, and in a subcommand."""
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", argparse.ArgumentParser.parse_known_args)
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1"])
    offer_flags(OFFERED)
    parser = parser_of("--stage_to_rank_map", "--rank", "--lr")
    assert vars(parser.parse_args()) == {"stage_to_rank_map": "0;1;", "rank": "3", "lr": "1"}
    assert parser.parse_args(["--rank", "7"]).rank == "7"
    assert parser_of("--rank").parse_args([]).rank == "own"
    commands = argparse.ArgumentParser()
    command = commands.add_subparsers().add_parser("train")
    command.add_argument("--stage_to_rank_map")
    assert commands.parse_args(["train"]).stage_to_rank_map == "0;1;"


def test_worker_args_override_the_source_of_the_script(tmp_path: Path) -> None:
    """V30"""
    script = tmp_path / "script.py"
    script.write_text("from arguments import parse_args")
    assert choose_flags(script, None) == choose_flags(script, False) == ()
    assert choose_flags(script, True) == WORKER_FLAGS
