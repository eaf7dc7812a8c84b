"""Hot morphs: the layout of a job changes while its processes, their state and the script's objects stay."""

import os
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, TaskFailed
from tests.tasks import find_loss, global_batch, take
from tests.toys import make_model
from tests.train.hot_jobs import (
    BATCH,
    CHUNK,
    Generation,
    Killed,
    die,
    give_when_waiting,
    managed,
    order_of,
    own_sockets,
    run,
    train_plainly,
    wait_for_files,
)
from varuna import DataLoader, Varuna
from varuna.errors import PeerLost, WorkerError
from varuna.execute.comm import session as session_module
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.session import Session
from varuna.execute.rebuild import generation, handover
from varuna.execute.rebuild.handover import Unit
from varuna.morph.run.order_page import OrderWriter
from varuna.morph.run.progress_page import ProgressReader
from varuna.morph.state import ManagerSettings, MorphParts
from varuna.train.hot import recover
from varuna.train.hot.eligible import open_models, report_if_hot, why_not_hot
from varuna.train.hot.hot_state import EarlierStep, HotState
from varuna.types import MorphOrder

F64 = {"rtol": 1e-9, "atol": 1e-11}

JOIN_AND_LEAVE = [
    Generation("0;1;", (0, 1)),
    Generation("0,2;1,3;", (0, 1, 2, 3)),  # wider: two join
    Generation("0;1;2;", (0, 2, 3)),  # deeper: one leaves
    Generation("0,1;2;", (2, 3, 0)),  # shallower: unequal replicas, other ranks
    Generation("0;", (3,), 1),  # narrower
]
EQUAL = [
    *JOIN_AND_LEAVE[:3],
    Generation("0,1;", (2, 3)),
    JOIN_AND_LEAVE[4],
]  # BatchNorm depends on the replicas
ALONE = [
    Generation("0;", (0,)),
    Generation("0;1,2;", (1, 0, 2)),  # a joiner is the first rank
    Generation("0;", (1,)),  # the first process leaves
]


REPLACED = "step is given other tensors than model.batches yields"


def check(
    results: list[Any],
    generations: list[Generation],
    name: str,
    tolerance: dict[str, float] = F64,
    **options: Any,
) -> None:
    """Compare every step with one plain process; processes and objects of the script stay."""
    steps = sum(one.steps for one in generations)
    losses, state = train_plainly(name, steps, **options)
    found: dict[int, float] = {}
    for process, result in enumerate(results):
        found |= result["losses"]
        for step, loss in result["losses"].items():
            torch.testing.assert_close(
                loss, losses[step], **tolerance, msg=lambda m, s=step: f"step {s}: {m}"
            )
        assert all(result["kept"]) and result["groups"]
        assert "StepTracer.close" in result["finalizers"], "the last traced step is lost"
        if result.get("killed"):
            continue
        for key, value in result.get("state", {}).items():
            torch.testing.assert_close(value, state[key], **tolerance, msg=lambda m, k=key: f"{k}: {m}")
        taken = [one for one in generations if process in one.members]
        layouts = [
            (one.layout.depth, one.layout.widths[one.layout.place(rank)[0]], rank)
            for one in taken
            for rank in [one.members.index(process)] * one.steps
        ]
        assert result["layouts"] == layouts
        assert ("exit" in result) == (process not in generations[-1].members)
        assert result.get("exit", 0) == 0
    assert sorted(found) == list(range(steps)), "every step once"


DROPOUT = {"model_options": {"dropout": 0.2}, "clip": 0.05}
FEATURES = {  # model, and options of the job
    "gradients that add up": ("Plain", {"accumulate": 3}),
    "ties, dropout, torch's clipping": ("GPT", {**DROPOUT, "clips_itself": True}),
    "ZeRO, ties, dropout, torch's clipping": (
        "GPT",
        {**DROPOUT, "clips_itself": True, "shard_optimizer": True},
    ),
    "ZeRO, state on the host, gradients that add up": (
        "Plain",
        {"accumulate": 3, "clip": 0.05, "shard_optimizer": True, "offloads": True},
    ),
    "ZeRO, state from the start": ("Plain", {"optimizer": "adagrad", "shard_optimizer": True}),
    "BatchNorm, ZeRO": ("Conv", {"optimizer": "sgd", "shard_optimizer": True}),
    "fp16": ("GPT", {"precision": "fp16", "dtype": torch.float32, "optimizer": "sgd"}),
}
OF_THE_JOB = ("clips_itself", "shard_optimizer", "offloads")


@pytest.mark.parametrize("feature", FEATURES)
def test_losses_are_those_of_one_process(pool: Pool, tmp_path: Path, feature: str) -> None:
    """HOT-1, HOT-2, HOT-6: wider, deeper, shallower with unequal replicas, and narrower.

    In all rows a learning rate schedule is registered.
    """
    name, options = FEATURES[feature]
    generations = EQUAL if name == "Conv" else JOIN_AND_LEAVE
    results = run(pool, tmp_path, name, generations, **options)
    plain = {key: value for key, value in options.items() if key not in OF_THE_JOB}
    if name == "Conv":
        plain["chunk"] = CHUNK
    tolerance = {"rtol": 2e-3, "atol": 1e-3} if "precision" in options else F64
    check(results, generations, name, tolerance, **plain)
    if "precision" in options:  # 9 steps, and the scale doubles every third
        assert results[3]["loss_scale"] == 1024 * 2**3


@pytest.mark.parametrize(("name", "options"), [("GPT", DROPOUT), ("Reused", {"shard_optimizer": True})])
def test_the_first_rank_may_join_and_leave(
    pool: Pool, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """HOT-1, HOT-2: from one process to three and back to another one."""
    results = run(pool, tmp_path, name, ALONE, **options)
    check(results, ALONE, name, **{key: value for key, value in options.items() if key not in OF_THE_JOB})


@pytest.mark.parametrize("shards", [False, True])
def test_only_what_changes_its_owner_moves(pool: Pool, tmp_path: Path, shards: bool) -> None:
    """HOT-6: a rank that keeps its stage receives nothing; one that is new gets its stage and no more.

    With ZeRO, it gets the state of the parameters that it owns from now on.
    """
    generations = [Generation("0;1;", (0, 1)), Generation("0,2;1,3;", (0, 1, 2, 3))]
    results = run(pool, tmp_path, "Plain", generations, shard_optimizer=shards)
    check(results, generations, "Plain")
    expected, stateful = [0, 0], []
    for stage, (layers, replica) in enumerate([(3, 2), (2, 3)]):
        names = results[replica]["stateful"]  # weights have 7 * 7 numbers, biases 7
        assert len(names) == len(set(names)) and (len(names) < 2 * layers) == shards
        state = sum(8 * 2 * (49 if "weight" in one else 7) + 4 for one in names)  # two moments, a counter
        expected.append(8 * 56 * layers + state)
        stateful += [*names, *results[stage]["stateful"]]
    assert [result["bytes"] for result in results] == expected
    assert len(stateful) == len(set(stateful)) if shards else len(stateful) == 2 * len(set(stateful))


LOSS = [
    Generation("0,2;1,3;", (0, 1, 2, 3)),
    Generation("0;1;", (0, 1), lost=(3,)),  # each stage has a holder left; another process leaves
    Generation("0,1;", (1, 0)),
]
LOSS_ONE_EARLIER = [LOSS[0]._replace(steps=1), LOSS[1]._replace(steps=3), LOSS[2]]


@pytest.mark.parametrize(
    ("name", "dies_in", "options"),
    [
        ("GPT", "backward", {"model_options": {"dropout": 0.2}, "clip": 0.05}),
        ("Plain", "fetch", {"accumulate": 3}),
        ("Plain", "commit", {}),
        ("GPT", "clip", {"model_options": {"dropout": 0.2}, "clip": 0.05, "clips_itself": True}),
        ("Plain", "evaluate", {}),
    ],
)
def test_no_step_is_lost_with_a_rank(
    pool: Pool, tmp_path: Path, name: str, dies_in: str, options: dict[str, Any]
) -> None:
    """HOT-3, HOT-4: survivors run the interrupted step again with their new shares, or all finish it.

    Also torch's clipping after a step, and an evaluation.
    """
    results = run(pool, tmp_path, name, LOSS, dies_in=dies_in, **options)
    assert [result.get("killed", False) for result in results] == [False, False, False, True]
    check(results, LOSS, name, **{key: value for key, value in options.items() if key not in OF_THE_JOB})
    if dies_in == "evaluate":
        model = make_model(name, dtype=torch.float64, seed=0)
        model.load_state_dict(train_plainly(name, LOSS[0].steps)[1])
        loss = find_loss(model.eval()(**global_batch(name, 0, BATCH, torch.float64)))
        for result in results[:2]:
            torch.testing.assert_close(result["evaluated"], loss.item(), **F64)


def play_with_a_loss_in_a_commit(
    play: Any,
    name: str,
    generations: Any,
    folder: str,
    *job: Any,
    begun: bool,
    messages: bool,
    **options: Any,
) -> Any:
    """Play; process 3 is lost at the commit of step 1, for which the others are ready at different moments.

    `begun`: it begins its commit and is killed; process 1 has begun before, the others begin after that.
    Else it falls silent before it begins. `messages`: the ranks do not share counters.
    """
    process, kept, files = dist.get_rank(), own_sockets(), Path(folder)
    start, open_counters = Session.start_barrier, session_module.open_counters

    def start_late(self: Session) -> None:
        if self.num_ranks < 4 or self.num_commits != 1:
            start(self)
        elif process == 3 and not begun:
            (files / "silent").touch()
            wait_for_files(*(files / f"finished_{other}" for other in (0, 1)))
            raise Killed
        elif process == 3:
            wait_for_files(files / "begun_1", files / "ready_0", files / "ready_2")
            start(self)
            (files / "begun_3").touch()
            die(kept)
        else:
            if begun and process != 1:
                (files / f"ready_{process}").touch()
                wait_for_files(files / "begun_3")
            start(self)
            (files / f"begun_{process}").touch()

    Session.start_barrier = start_late  # type: ignore[method-assign]
    if messages:
        session_module.open_counters = lambda *_, **__: None
    try:
        return play(name, generations, folder, *job, dies_in="" if begun else "update", **options)
    finally:
        Session.start_barrier = start  # type: ignore[method-assign]
        session_module.open_counters = open_counters


@pytest.mark.parametrize("messages", [False, True], ids=["counters", "messages"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "silent"])
def test_a_step_counts_on_all_ranks_or_on_none(
    pool: Pool, tmp_path: Path, begun: bool, clip: float | None, messages: bool
) -> None:
    """HOT-3: also if the lost rank had told some of them that its gradients are whole."""
    through: dict[str, Any] = {"through": play_with_a_loss_in_a_commit, "begun": begun, "messages": messages}
    results = run(pool, tmp_path, "Plain", LOSS if begun else LOSS_ONE_EARLIER, clip=clip, **through)
    assert [result.get("killed", False) for result in results] == [False, False, False, True]
    counts = 1 in results[2]["losses"]  # this process leaves after the step, or before it is run again
    assert counts or messages or not begun, "a rank that has begun its commit has done its part"
    check(results, LOSS if counts else LOSS_ONE_EARLIER, "Plain", clip=clip)


def play_with_a_hook(play: Any, *job: Any, **options: Any) -> dict[str, Any]:
    """Play with a hook that the script has registered and the manager does not know yet."""
    set_optimizer = Varuna.set_optimizer

    def register(self: Varuna, *args: Any, **kwargs: Any) -> None:
        set_optimizer(self, *args, **kwargs)
        next(iter(self.parameters())).register_hook(lambda gradient: gradient)

    Varuna.set_optimizer = register  # type: ignore[method-assign,assignment]
    try:
        found: dict[str, Any] = play(*job, **options)
        return found
    except PeerLost as error:
        for model in open_models():  # the next test of these processes wraps another one
            model._session.abandon()
        return {"lost": str(error)}
    finally:
        Varuna.set_optimizer = set_optimizer  # type: ignore[method-assign]


def test_hooks_of_the_script_restart_the_job_also_if_the_loss_comes_while_they_are_taken_off(
    pool: Pool, tmp_path: Path
) -> None:
    """HOT-4: in place, the next steps would run without them."""
    results = run(pool, tmp_path, "Plain", LOSS, through=play_with_a_hook, dies_in="backward")
    assert ["lost" in result for result in results] == [True, True, True, False] and results[3]["killed"]


@pytest.mark.parametrize(
    ("name", "before", "after", "options"),
    [
        ("GPT", "0;1;2;", "0;1;", {"dies_in": "backward", **DROPOUT}),
        ("Plain", "0;1;2;", "0,1;", {"dies_in": "fetch", "accumulate": 2}),
        ("Plain", "0,1;2;", "0;1;", {"dies_in": "fetch", "shard_optimizer": True}),
        ("Plain", "0,2;1;", "0;1;", {"dies_in": "update", "shard_optimizer": True}),
        ("GPT", "0;1;2;", "0;1;", {"dies_in": "clip", **DROPOUT, "clips_itself": True}),
    ],
)
def test_a_job_without_replicas_goes_back_to_copies_on_other_ranks(
    pool: Pool, tmp_path: Path, name: str, before: str, after: str, options: dict[str, Any]
) -> None:
    """HOT-3: D = 1, and state that ZeRO keeps once; copies as often as possible.

    "update": a process falls silent in its update, and the manager's order frees the ranks that wait for it.
    """
    generations = [Generation(before, (0, 1, 2), 7), Generation(after, (1, 0), 3, lost=(2,))]
    results = run(pool, tmp_path, name, generations, copy_cost=1e9, **options)
    of_the_job = (*OF_THE_JOB, "dies_in")
    plain = {key: value for key, value in options.items() if key not in of_the_job}
    losses, state = train_plainly(name, 10, **plain)
    assert [result.get("killed", False) for result in results] == [False, False, True]
    for result in results[:2]:
        assert sorted(result["losses"]) == list(range(10)) and result["groups"]
        torch.testing.assert_close([result["losses"][step] for step in range(10)], losses, **F64)
        torch.testing.assert_close(result["state"], state, **F64)
        assert result["void"] == 1  # the rest of the loop ran without a trained step
        redone = len(result["layouts"]) - 10
        assert redone <= 2  # none on a rank that had not finished its step


@pytest.mark.parametrize("place", ["handover", "barrier"])
@pytest.mark.parametrize(("name", "options"), [("GPT", DROPOUT), ("Plain", {})])
def test_a_loss_while_state_has_moved_leaves_the_others_in_one_state(
    pool: Pool, tmp_path: Path, name: str, options: dict[str, Any], place: str
) -> None:
    """HOT-3: they keep the last layout, or all use the next one, also with ties between stages."""
    generations = [
        Generation("0,1;2,3;", (0, 1, 2, 3)),
        Generation("0,1;2,3;", (2, 0, 1, 3), 0),
        Generation("0;1;", (0, 1), 3, lost=(3,)),
    ]
    results = run(pool, tmp_path, name, generations, interrupts=place, **options)
    assert [result.get("killed", False) for result in results] == [False, False, False, True]
    check(results, generations, name, **options)


@pytest.mark.parametrize("place", ["handover", "barrier"])
@pytest.mark.parametrize(
    ("mapping", "after", "options"),
    [("0;1;2;3;", "0;1;", {}), ("0,1;2,3;", "0,1;", {"shard_optimizer": True})],
)
def test_a_loss_while_a_job_without_replicas_goes_back_sends_it_back_again(
    pool: Pool, tmp_path: Path, mapping: str, after: str, options: dict[str, Any], place: str
) -> None:
    """HOT-3: the others still have their copies of the earlier step."""
    generations = [
        Generation(mapping, (0, 1, 2, 3), 7),
        Generation("0;1;2;", (0, 1, 2), 0, lost=(3,)),
        Generation(after, (2, 0), 3, lost=(1,)),
    ]
    options = {"dies_in": "backward", **options}
    results = run(pool, tmp_path, "Plain", generations, copy_cost=1e9, interrupts=place, **options)
    losses, state = train_plainly("Plain", 10)
    assert [result.get("killed", False) for result in results] == [False, True, False, True]
    for result in (results[0], results[2]):
        assert sorted(result["losses"]) == list(range(10)) and result["groups"]
        torch.testing.assert_close([result["losses"][step] for step in range(10)], losses, **F64)
        torch.testing.assert_close(result["state"], state, **F64)


DEEPER_AND_BACK = [Generation("0;", (0,), 3), Generation("0;1;", (0, 1), 3), Generation("0;", (1,), 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "model_options"), [("Plain", {"dropout": 0.2}), ("Conv", {})])
def test_a_change_of_depth_alone_changes_no_bit(
    pool: Pool, tmp_path: Path, name: str, model_options: dict[str, Any], dtype: torch.dtype
) -> None:
    """HOT-1: with one replica, all sums keep their order, except those of weights that stages share."""
    options: dict[str, Any] = {"dtype": dtype, "model_options": model_options}
    first, second = run(pool, tmp_path, name, DEEPER_AND_BACK, **options)
    losses, state = train_plainly(name, 9, chunk=CHUNK, **options)
    found = first["losses"] | second["losses"]
    assert [found[step] for step in range(9)] == losses
    assert second["state"].keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in second["state"].items())


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:47016"), True),
    ],
)
def test_a_morph_waits_for_an_order_only_after_an_error_of_a_connection(
    monkeypatch: pytest.MonkeyPatch, error: Exception, waits: bool
) -> None:
    """HOT-4: an error of this rank itself is raised at once, as the error of the job."""
    order = order_of(DEEPER_AND_BACK, 1, process=0, port=1)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    waited = []
    monkeypatch.setattr(recover, "morph", fail)
    monkeypatch.setattr(recover, "recover", lambda model, error, **_: waited.append(error))
    hot = HotState(waits_for_orders=True, generation=1)
    model: Any = SimpleNamespace(_hot=hot, _orders=SimpleNamespace(abandons=False))
    with nullcontext() if waits else pytest.raises(type(error), match=str(error)):
        recover.carry_out(model, order)
    assert waited == [error] * waits


def test_survivors_wait_longer_for_those_that_are_busy_than_their_manager_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HOT-3: the manager knows which worker hangs, and ends it."""
    waited = []

    def open_store(url: str, rank: int, world: int, *, timeout: timedelta) -> None:
        waited.append(timeout.total_seconds())
        raise ValueError("enough")

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(generation, "rendezvous", open_store)
    order = order_of(DEEPER_AND_BACK, 1, process=0, port=1)
    with pytest.raises(ValueError, match="enough"):
        generation.exchange_steps(order, generation.SurvivorStep(1, 3, True))
    (seconds,) = waited
    assert seconds > ManagerSettings().idle_seconds


@pytest.mark.parametrize(
    ("call", "arguments"),
    [(Varuna.report, ()), (Varuna.load_checkpoint, ("folder",)), (Varuna.resume, ("folder",))],
)
def test_calls_after_a_step_that_was_not_trained_restart_the_job(call: Any, arguments: Any) -> None:
    """HOT-4: the ranks may be in different steps of the loop, so not all of them would make the call."""
    layout = Generation("0;1;", (0, 1)).layout
    order = MorphOrder(
        generation=2,
        layout=layout,
        last_layout=layout,
        rank=0,
        previous=(0, None),
        master_addr="",
        master_port=1,
    )
    hot = HotState(waits_for_orders=True, generation=1, going_back=EarlierStep(3, order, {}, MorphParts()))
    model: Any = SimpleNamespace(_hot=hot, _session=SimpleNamespace(provisional=False))
    with pytest.raises(PeerLost, match=r"go back to step 3 .*overflow=True"):
        call(model, *arguments)


def test_a_scheduler_that_is_not_registered_is_refused_after_a_join(pool: Pool, tmp_path: Path) -> None:
    """HOT-5: it would start anew on the joiner, and the replicas would drift apart."""
    generations = [Generation("0;", (0,), 3), Generation("0,1;", (0, 1), 4)]
    with pytest.raises(TaskFailed, match=r"register the learning rate scheduler"):
        run(pool, tmp_path, "Plain", generations, registers=False)


def linear() -> tuple[Varuna, torch.optim.Optimizer]:
    sample = {"input": torch.randn(2, 3)}
    wrapped = Varuna(
        *(torch.nn.Linear(3, 1), "0;", sample, 4, 2), device="cpu", loss=lambda output: output.square().mean()
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped.set_optimizer(optimizer)
    return wrapped, optimizer


def test_a_loop_that_replaces_the_inputs_of_batches_restarts_the_job_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """HOT-2: a loss in a step would not be survived, although the library fetches the batches."""
    wrapped, optimizer = linear()
    reasons = []
    with caplog.at_level("INFO", "varuna"):
        for step, inputs in wrapped.batches(lambda share: {"input": torch.ones(len(share), 3)}, steps=6):
            wrapped.step(inputs if step in (2, 3) else {key: value * 2 for key, value in inputs.items()})  # type: ignore[operator]
            report_if_hot(wrapped)
            reasons.append(why_not_hot(wrapped))
            assert wrapped._hot.reported == reasons[-1]
            optimizer.step()
            wrapped.zero_grad()
    assert [reason.startswith(REPLACED) for reason in reasons] == [True, True, False, False, True, True]
    assert reasons[2:4] == ["", ""]
    assert sum(REPLACED in record.message for record in caplog.records) == 1
    wrapped.close()


def step_after_a_loss(
    _: Any, name: str, generations: list[Generation], folder: str, ports: list[int], *, replaces: bool
) -> str:
    """Lose a process in the evaluation between a batch and its step."""
    process, world, kept = dist.get_rank(), dist.get_world_size(), own_sockets()
    with managed(folder, generations[0], process, ports, world):
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        sample = global_batch(name, 0, 2, torch.float64)
        model = make_model(name, dtype=torch.float64, seed=0)
        wrapped = Varuna(
            *(model, generations[0].mapping, sample, BATCH, CHUNK), device="cpu", timeout_seconds=80
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        wrapped.set_optimizer(optimizer)
        if process not in generations[1].lost:
            order = order_of(generations, 1, process, ports[1])
            args = progress, orders, order
            threading.Thread(target=give_when_waiting, args=args, daemon=True).start()

        def fetch(samples: Any) -> dict[str, object]:
            first = samples.start % BATCH
            return take(
                global_batch(name, 0, BATCH, torch.float64), range(first, first + len(samples)), BATCH
            )

        (Path(folder) / f"ready_{process}").touch()
        try:
            for _step, inputs in wrapped.batches(fetch, steps=1):
                if process in generations[1].lost:
                    wait_for_files(*(Path(folder) / f"ready_{other}" for other in range(world)))
                    die(kept)
                before = wrapped.evaluate(fetch, BATCH)
                loss, _overflow = wrapped.step(dict(inputs) if replaces else inputs)
                torch.testing.assert_close(loss, before, **F64)
            return "trained"
        except Killed:
            return "killed"
        except RuntimeError as error:
            return str(error)
        finally:
            wrapped.close()
            orders.close()
            progress.close()


@pytest.mark.parametrize("replaces", [False, True])
def test_inputs_that_were_fetched_for_another_share_are_refused(
    pool: Pool, tmp_path: Path, replaces: bool
) -> None:
    """HOT-2: else a step would train the old share in the new layout, and lose samples silently."""
    generations = [Generation("0,1,2;", (0, 1, 2), 0), Generation("0,1;", (0, 1), 1, lost=(2,))]
    *survivors, lost = run(pool, tmp_path, "Plain", generations, through=step_after_a_loss, replaces=replaces)
    assert lost == "killed"
    for rank, found in enumerate(survivors):
        if replaces:
            expected = f"those of replica {rank} of 3, but a morph has made this rank replica {rank} of 2"
            assert expected in found or "RuntimeError" in found, found
        else:
            assert found == "trained"
    assert not replaces or any("change them inside the function" in found for found in survivors)


def read_after_a_morph(
    _: Any, name: str, generations: list[Generation], folder: str, ports: list[int], *, sources: list[int]
) -> Any:
    """Morph in place, then read batches with a loader that was made before; `sources` have the data."""
    process, world = dist.get_rank(), dist.get_world_size()
    with managed(folder, generations[0], process, ports, world) as joins:
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        sample = global_batch(name, 0, 2, torch.float64)
        model = make_model(name, dtype=torch.float64, seed=0)
        wrapped = Varuna(
            *(model, generations[0].mapping, sample, BATCH, CHUNK), device="cpu", timeout_seconds=80
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        wrapped.set_optimizer(optimizer)
        data = [global_batch(name, number, BATCH, torch.float64) for number in range(3)]
        loader = DataLoader(data if process in sources else None, wrapped, name=None)
        order = order_of(generations, 1, process, ports[1])
        if joins:
            orders.give(order)

        def fetch(samples: Any) -> dict[str, object]:
            first = samples.start % BATCH
            return take(data[0], range(first, first + len(samples)), BATCH)

        try:
            for step, inputs in wrapped.batches(fetch, steps=3):
                if step == 0 and not joins:
                    orders.give(order)
                wrapped.step(inputs)
                optimizer.step()
                wrapped.zero_grad()
            return wrapped.rank, [inputs["x"] for inputs in loader]
        except (TypeError, WorkerError) as error:
            return str(error)
        finally:
            wrapped.close()
            orders.close()
            progress.close()


@pytest.mark.parametrize("sources", [[0], [0, 1]])
@pytest.mark.parametrize("members", [(0, 1, 2), (1, 2, 0)])
def test_a_loader_reads_for_the_ranks_after_a_morph(
    pool: Pool, tmp_path: Path, members: tuple[int, ...], sources: list[int]
) -> None:
    """HOT-2: it was made before. If the first rank changes, another process reads."""
    generations = [Generation("0,1;", (0, 1), 1), Generation("0,1,2;", members, 2)]
    results = run(pool, tmp_path, "Plain", generations, through=read_after_a_morph, sources=sources)
    if members[0] not in sources:
        assert all("the first rank needs an iterable of batches, not a NoneType" in one for one in results)
        return
    by_rank = [batches for _, batches in sorted(results, key=lambda one: one[0])]
    for number, shares in enumerate(zip(*by_rank, strict=True)):
        expected = global_batch("Plain", number, BATCH, torch.float64)["x"]
        assert torch.equal(torch.cat(shares), expected)  # type: ignore[arg-type]
    assert len(by_rank[0]) == 3


def play_epochs(
    _: Any, name: str, generations: list[Generation], folder: str, ports: list[int], *, order_at: int
) -> dict[int, float]:
    """Train two epochs of two steps, each with an evaluation after it. Returns all losses, by step."""
    process, world, losses = dist.get_rank(), dist.get_world_size(), {}
    with managed(folder, generations[0], process, ports, world) as joins:
        page = Path(os.environ["VARUNA_PROGRESS_FILE"])
        progress, orders = ProgressReader(page, process), OrderWriter(page)
        sample = global_batch(name, 0, 2, torch.float64)
        model = make_model(name, dtype=torch.float64, seed=0)
        wrapped = Varuna(
            *(model, generations[0].mapping, sample, BATCH, CHUNK), device="cpu", timeout_seconds=80
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        wrapped.set_optimizer(optimizer)
        order = order_of(generations, 1, process, ports[1])
        if joins:
            orders.give(order)

        def fetch(samples: Any) -> dict[str, object]:
            step, first = divmod(samples.start, BATCH)
            inputs = global_batch(name, step, BATCH, torch.float64)
            return take(inputs, range(first, first + len(samples)), BATCH)

        try:
            for epoch in range(wrapped.resume(Path(folder) / "store") // 2, 2):
                for step, inputs in wrapped.batches(fetch, steps=2 * (epoch + 1)):
                    if step == order_at and not joins:
                        orders.give(order)
                    losses[step], _overflow = wrapped.step(inputs)
                    optimizer.step()
                    wrapped.zero_grad()
                losses[100 + epoch] = wrapped.evaluate(fetch, BATCH)
            return losses
        finally:
            wrapped.close()
            orders.close()
            progress.close()


@pytest.mark.parametrize("order_at", [0, 1])
def test_a_machine_may_join_at_the_end_of_an_epoch(pool: Pool, tmp_path: Path, order_at: int) -> None:
    """HOT-2: the others evaluate before it enters."""
    generations = [Generation("0,1;", (0, 1), 1), Generation("0,1,2;", (0, 1, 2), 3)]
    first, second, joiner = run(pool, tmp_path, "Plain", generations, through=play_epochs, order_at=order_at)
    assert first == second and sorted(first) == [0, 1, 2, 3, 100, 101]
    assert sorted(joiner) == ([1, 2, 3, 100, 101] if order_at == 0 else [2, 3, 101])
    model = make_model("Plain", dtype=torch.float64, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = find_loss(model(**global_batch("Plain", step, BATCH, torch.float64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for found in (first, joiner):
            torch.testing.assert_close(found.get(step, loss.item()), loss.item(), **F64)
        if step % 2:
            evaluated = find_loss(model(**global_batch("Plain", 0, BATCH, torch.float64))).item()
            for found in (first, joiner):
                torch.testing.assert_close(found.get(100 + step // 2, evaluated), evaluated, **F64)


def test_damaged_bytes_are_sent_again_and_then_refused(pool: Pool, tmp_path: Path) -> None:
    """HOT-6: a flipped bit on the way does not reach the model."""
    assert pool.run(receive_damaged, 2, 1) == [["x"], ["x"]]
    with pytest.raises(TaskFailed, match="arrived 2 times with other bytes"):
        pool.run(receive_damaged, 2, 2)


def test_a_damaged_description_of_what_moves_is_refused(pool: Pool, tmp_path: Path) -> None:
    """HOT-6: it holds names, optimizer groups, counters and learning rates."""
    with pytest.raises(TaskFailed, match="the description of what participant 0 sends arrived with other"):
        pool.run(receive_damaged, 2, 1, part="name")


class Store:
    """A participant that gives and takes tensors by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def give(self, name: str) -> Unit:
        return Unit(None, {"value": self.tensors[name]})

    def memory(self, name: str, key: str) -> None:
        return None

    def take(self, name: str, unit: Unit) -> None:
        assert torch.equal(unit.tensors["value"], torch.arange(9.0))
        self.tensors[name] = unit.tensors["value"]


def receive_damaged(times: int, *, part: str = "tensor") -> list[str]:
    """Hand one tensor over; the first arrivals of the tensor, or of its name, are damaged."""
    rank = dist.get_rank()
    store = Store({"x": torch.arange(9.0)} if rank == 0 else {})
    arrive = handover._Transfer._arrive

    def damage(self: Any, works: Any, memory: torch.Tensor) -> None:
        nonlocal times
        arrive(self, works, memory)
        data = memory.numpy().tobytes()
        place = 5 if part == "tensor" else data.find(b"\xa1x")  # msgpack of "x"
        if (len(data) == 36 if part == "tensor" else place >= 0) and times:
            times -= 1
            memory[place + 1] ^= 16

    handover._Transfer._arrive = damage  # type: ignore[method-assign]
    try:
        key = dist.PrefixStore("damage", dist.distributed_c10d._get_default_store())
        group: Any = dist.ProcessGroupGloo(key, rank, 2, timedelta(seconds=20))
        holds, lacks = ({"x": 36}, []) if rank == 0 else ({}, ["x"])
        moves = list[int]()
        handover.hand_over(
            *(Collective(rank, range(2), group), "here", holds, lacks, store),
            note_progress=lambda: moves.append(1),
        )
        assert moves  # the manager does not take a long transfer for a hang
    finally:
        handover._Transfer._arrive = arrive  # type: ignore[method-assign]
    return list(store.tensors)
