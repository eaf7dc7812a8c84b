"""The door to checkpoints: what of a wrapped model is saved, who writes it, and how it comes back.

Everything is saved under the names of the unwrapped model, so that what one layout wrote any other
reads. All ranks call `save` and `load` together, and all succeed or all raise the same error: then
nothing is half saved, nothing half loaded, and training can go on.
"""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

import varuna
from varuna.checkpoint.background import Background, Order
from varuna.checkpoint.format.manifest import Facts, Json, Manifest, Part, folder_of, hash_of
from varuna.checkpoint.format.optimizer import number_groups, pack_groups, pack_state, unpack_optimizer
from varuna.checkpoint.format.part import Spec, lay_out
from varuna.checkpoint.format.tensors import as_plain, fill, memory_of, spec_of, tensor_from
from varuna.checkpoint.format.tree import pack, unpack
from varuna.checkpoint.load import Checkpoint, newest, open_checkpoint
from varuna.checkpoint.save import abandon, commit, tidy, write_part
from varuna.checkpoint.select import State, Wanted, want
from varuna.checkpoint.store.store import Claim, Owner, Store, open_store, retrying
from varuna.environment import VarunaEnvironment
from varuna.errors import CheckpointError, StoreTaken
from varuna.execute.comm.collective import RankFailure
from varuna.execute.comm.session import Session
from varuna.execute.step.trainer import Trainer
from varuna.execute.update.precision import LossScale
from varuna.types import Plan, place_in_map, spread_by_size

log = logging.getLogger("varuna")

RETRY_SECONDS = 60.0
"""How long an operation of a store that fails is tried again."""
WAITING_PATIENCE = 15.0
"""Writing and reading may keep the other ranks waiting so many times longer than the timeout."""
LAST_SECONDS = 20.0
"""How long a job that has failed waits at its end for a save that is under way."""
EARLIER_RUN_SECONDS = 20.0
"""How long an earlier run of the same job may keep its claim: one that is cut off ends within ten."""
ROUND_SECONDS = 1.0
"""While an earlier save is under way, the ranks tell each other so often how it stands."""

Value = TypeVar("Value")
PathLike = str | os.PathLike[str]


class Stateful(Protocol):
    """Anything that can be saved beside the model: a learning rate scheduler, a data loader."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class Word(msgspec.Struct, frozen=True):
    """What a rank tells the others before a save."""

    facts: Facts  # the first rank's count
    groups: Sequence[bytes]  # of its optimizer
    registered: Mapping[str, str]  # hashes of the states of registered objects: one state for all ranks


class Share(msgspec.Struct):
    """What one rank writes of a checkpoint."""

    tensors: dict[str, Tensor]
    trees: dict[str, Json]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def add(self, other: "Share") -> None:
        self.tensors |= other.tensors
        self.trees |= other.trees


def newest_checkpoint(global_store: PathLike) -> int | None:
    """The step of the newest complete checkpoint in a store."""
    return newest(open_store(os.fspath(global_store)))


@dataclass
class Held:
    """What a save has taken that must be given back, at the latest when the model goes.

    It refers to nothing of the model: what is called then must not keep that from going.
    """

    claims: dict[str, Claim] = field(default_factory=dict)
    background: Background | None = None
    tempdir: str = ""  # where its snapshots lie
    failed: bool = False  # the job has: whoever is gone will not write its part

    def close(self) -> None:
        """Waits for a save that is under way, and lets other jobs write where this one did."""
        if self.background is not None:
            if self.failed and not self.background.wait(LAST_SECONDS):
                self.background.abandon("the job has failed")
            self.background.close()
            self.background = None
        for claim in self.claims.values():
            claim.release()
        self.claims.clear()


@dataclass
class Checkpoints:
    """Saves and loads one wrapped model."""

    session: Session
    plan: Plan
    state: State
    ties: Sequence[tuple[str, ...]]
    names: frozenset[str]  # all that the whole model knows, aliases too
    trainer: Trainer
    timeout_seconds: float
    shards_optimizer: bool = False
    optimizer: torch.optim.Optimizer | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    store: str | None = None  # the last one saved to or loaded from
    loaded_before_optimizer: str = ""
    _registered: dict[str, Stateful] = field(default_factory=dict)
    _unclaimed: dict[str, Any] = field(default_factory=dict)  # loaded, but nothing is registered for it yet
    _first_stage: dict[str, int] = field(default_factory=dict)  # of those that hold a name: this one saves it
    held: Held = field(default_factory=Held)
    _under_way: "Future[Any] | None" = None
    _job: str = ""

    def register(self, name: str, thing: Stateful) -> None:
        if name in self._registered:
            raise ValueError(f"something is registered as {name!r} already (choose another name)")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TypeError(
                f"what is registered as {name!r} is a {type(thing).__name__}; expected something with "
                "state_dict() and load_state_dict() (a class of your own with these two will do)"
            )
        self._registered[name] = thing
        if name in self._unclaimed:
            thing.load_state_dict(self._unclaimed.pop(name))

    # ------------------------------------------------------------ saving

    @property
    def tempdir(self) -> str:
        """Where the last copy for a save in the background was made."""
        return self.held.tempdir or "memory"

    def has_room(self, available_bytes: int | None, *, sharers: int) -> bool:
        """Whether memory holds a copy of this rank's state beside those of the `sharers` of its machine."""
        if self.held.background is not None or available_bytes is None:
            return True
        held: list[Tensor] = [self.state.tensor(name) for name in self.state.canonical]
        if self.optimizer is not None:
            states = self.optimizer.state.values()
            held += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
        return 2 * num_bytes * sharers < available_bytes

    def save(
        self,
        global_store: PathLike,
        *,
        step: int | None = None,
        tempdir: PathLike | None = None,
        shard: bool = False,
        keep_last: int | None = None,
        gradients: bool = False,
        by_itself: bool = False,
    ) -> "Future[str]":
        """Complete on return or, with `tempdir`, in the background.

        With `gradients` those that are there go along: the save may come between accumulated steps.
        What is saved `by_itself` is removed when newer ones are there.
        """
        step = self.trainer.iteration if step is None else step
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"a checkpoint's step must be a whole number from 0 on, not {step!r}")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, the checkpoint just written, not {keep_last}")
        what = f"checkpoint {step} was not written"
        store = retrying(open_store(os.fspath(global_store)), seconds=RETRY_SECONDS, on_wait=log.warning)
        with self.session.patient(WAITING_PATIENCE):
            self._settle_earlier_save()
            words = self._agree(lambda: self._word(store, step, by_itself), what)
            _check_alike(words)
            facts = words[self._first_index].facts
            self._learn_who_holds_what()
            share = self._agree_on_own(lambda: self._share(words, shard=shard, gradients=gradients), what)
            self.store = store.url
            if tempdir is not None:
                return self._save_later(store, facts, share, os.fspath(tempdir), shard, keep_last)
            self._save_now(store, facts, share, shard, keep_last, what)
        done: Future[str] = Future()
        done.set_result(f"{store.url}/{folder_of(step)}")
        return done

    def _save_now(
        self, store: Store, facts: Facts, share: Share, shard: bool, keep_last: int | None, what: str
    ) -> None:
        writes = self._writer in self._writers(shard)

        def write() -> Part | None:
            if not writes:
                return None
            plain = {key: as_plain(key, tensor) for key, tensor in share.tensors.items()}
            specs = [spec_of(key, tensor) for key, tensor in plain.items()]
            layout = lay_out(specs, metadata={"format": "pt"})
            return write_part(
                store, facts, self._writer, specs, layout, lambda key: memory_of(plain[key]), share.trees
            )

        def finish() -> None:
            if self._is_first:
                self._claim(store)  # the job may go on without this run since it has begun to write
                manifest = commit(store, [part for part in parts if part is not None])
                try:
                    tidy(store, manifest, keep_last=keep_last)
                except OSError as error:  # the checkpoint is there all the same
                    log.warning("checkpoint %d is saved, but old ones stay: %s", facts.step, error)

        try:
            parts = self._agree(write, what)
        except CheckpointError:
            if writes:
                with suppress(OSError):
                    abandon(store, facts, self._writer)
            raise
        self._agree(finish, what)  # where this fails the manifest may be there, so the parts stay

    def _save_later(
        self,
        store: Store,
        facts: Facts,
        share: Share,
        tempdir: str,
        shard: bool,
        keep_last: int | None,
    ) -> "Future[str]":
        done: Future[str] = Future()
        place = f"{store.url}/{folder_of(facts.step)}"
        if self._writer not in self._writers(shard):
            done.set_result(place)
            return done
        if self.held.background is None or self.held.tempdir != tempdir:
            if self.held.background is not None:
                self.held.background.close()
            self.held.background = Background(None if tempdir == "memory" else tempdir)
            self.held.tempdir = tempdir
        specs = [spec_of(key, tensor) for key, tensor in share.tensors.items()]
        order = Order(
            url=store.url,
            retry_seconds=RETRY_SECONDS,
            facts=facts,
            writer=self._writer,
            trees=share.trees,
            commits=self._is_first,
            writers=self._writers(shard),
            keep_last=keep_last,
        )
        layout = lay_out(specs, metadata={"format": "pt"})
        self._under_way = self.held.background.start(order, specs, layout, share.tensors)
        self._under_way.add_done_callback(lambda ended: _pass_on(ended, done, place))
        return done

    def _settle_earlier_save(self) -> None:
        """Waits for a save that is under way on any rank; gives it up on all where one rank's has failed."""
        while True:
            if self.held.background is not None:
                self.held.background.wait(ROUND_SECONDS)
            reports = self.session.gather(self._report())
            failures = [report.removeprefix("failed: ") for report in reports if report.startswith("failed")]
            if failures:
                if self.held.background is not None and self.held.background.busy:
                    self.held.background.abandon(failures[0])
                log.error("the checkpoint before this one is given up: %s", failures[0])
            if failures or not any(reports):
                self._under_way = None
                return

    def _report(self) -> str:
        """ "" where nothing is under way here, else how it stands."""
        under_way, background = self._under_way, self.held.background
        if under_way is None or background is None:
            return ""
        if under_way.done():
            error = under_way.exception()
            return "" if error is None else f"failed: {self._me}: {error}"
        limit = self.timeout_seconds
        if background.stalled_seconds > limit:
            return f"failed: {self._me}: {background.doing} has not moved for {limit:g} s"
        return f"busy: {background.doing}"

    # ------------------------------------------------------------ who saves what

    def _word(self, store: Store, step: int, by_itself: bool) -> Word:
        if self._is_first:
            self._claim(store)
        tensors: dict[str, Tensor] = {}
        states = {
            name: hash_of(msgspec.json.encode(pack(thing.state_dict(), f"registered/{name}", tensors)))
            for name, thing in self._registered.items()
        }
        groups = [] if self.optimizer is None else pack_groups(self.optimizer)
        return Word(self._facts(step, by_itself), groups, states)

    def _facts(self, step: int, by_itself: bool) -> Facts:
        return Facts(
            step=step,
            iteration=self.trainer.iteration,
            attempt=uuid.uuid4().hex[:8],
            job=self._name_of_job(),
            fingerprint=self.plan.fingerprint,
            plan=self.plan,
            seed=self.trainer.seed,
            ties=tuple(self.ties),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            versions={"varuna": varuna.__version__, "torch": str(torch.__version__)},
            by_itself=by_itself,
        )

    def _name_of_job(self) -> str:
        """That of the checkpoint it goes on from, else its launcher's, else one of its own."""
        self._job = self._job or VarunaEnvironment.read(os.environ).job_id or uuid.uuid4().hex[:12]
        return self._job

    def _claim(self, store: Store) -> None:
        if store.url in self.held.claims:
            self.held.claims[store.url].check()
            return
        owner = Owner(self._name_of_job(), uuid.uuid4().hex, socket.gethostname(), os.getpid())
        self.held.claims[store.url] = claim_after_own(store, owner)

    def _share(self, words: Sequence[Word], *, shard: bool, gradients: bool) -> Share:
        """What this rank writes: each tensor is written once, by the first stage that holds it.

        By its first replica, or with `shard` by all of them, evenly by bytes; a sharded optimizer's
        state lies with one replica only, which writes it.
        """
        groups, numbers = number_groups([word.groups for word in words])
        share = Share({}, {})
        units: list[Share] = []  # what is not split further
        for name in self._names_saved_here():
            kind = "model" if self.state.is_persistent(name) else "transient"
            tensor = self.state.tensor(name)
            units.append(Share({f"{kind}/{name}": tensor}, {}))
            if gradients and tensor.grad is not None:
                units.append(Share({f"gradient/{name}": tensor.grad}, {}))
        own_numbers = numbers[self._index]
        for name, parameter, group in self._optimized():
            assert self.optimizer is not None
            unit = Share({}, {})
            unit.trees[f"optimizer/{name}"] = pack_state(
                self.optimizer, parameter, name, group=own_numbers[group], tensors=unit.tensors
            )
            if self.shards_optimizer:
                share.add(unit)
            else:
                units.append(unit)
        sizes = [unit.num_bytes for unit in units]
        replicas = spread_by_size(sizes, parts=self.session.width) if shard else [0] * len(units)
        for replica, unit in zip(replicas, units, strict=True):
            if replica == self.session.replica:
                share.add(unit)
        if self._is_first:
            share.trees["groups"] = groups
            share.trees["loss_scale"] = pack(self.loss_scale.state_dict(), "loss_scale", share.tensors)
            for name, thing in self._registered.items():
                key = f"registered/{name}"
                share.trees[key] = pack(thing.state_dict(), key, share.tensors)
        return share

    def _learn_who_holds_what(self) -> None:
        if not self._first_stage:
            held = self.session.gather(tuple(self.state.canonical))
            for (stage, _), names in zip(self._places(), held, strict=True):
                for name in names:
                    self._first_stage[name] = min(stage, self._first_stage.get(name, stage))

    def _names_saved_here(self) -> list[str]:
        return [name for name in self.state.canonical if self._first_stage[name] == self.session.stage]

    def _optimized(self) -> Iterator[tuple[str, Tensor, int]]:
        """(name, parameter, group) of those that this rank's optimizer holds and this stage saves."""
        if self.optimizer is None:
            return
        names = {self.state.tensor(name): name for name in self._names_saved_here()}
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in names:
                    yield names[parameter], parameter, index

    # ------------------------------------------------------------ loading

    def load(
        self,
        global_store: PathLike,
        step: int | None,
        *,
        check_complete: bool = True,
        strict: bool = True,
        cast: bool = False,
    ) -> int:
        """Reads and checks all that this rank needs before anything is changed; returns the step."""
        store = retrying(open_store(os.fspath(global_store)), seconds=RETRY_SECONDS, on_wait=log.warning)
        what = "no checkpoint was loaded"
        with self.session.patient(WAITING_PATIENCE):
            found = self._agree(lambda: self._find(store, step, check_complete), what)
            manifest = found[self._first_index]
            assert manifest is not None
            wanted = self._agree_on_own(
                lambda: want(
                    manifest,
                    self.state,
                    self.optimizer,
                    ties=self.ties,
                    names=self.names,
                    strict=strict,
                    complete=check_complete,
                    cast=cast,
                ),
                what,
            )
            checkpoint = Checkpoint(store, manifest)
            views = self._agree_on_own(lambda: checkpoint.read(wanted.keys), what)
            self._agree(lambda: self._take_over(manifest, wanted, views), f"{what} to its end")
        self.store = store.url
        log.info("loaded checkpoint %s of %s", manifest.facts.step, store.url)
        return manifest.facts.step

    def newest(self, global_store: PathLike) -> int | None:
        """The newest complete one, the same answer on all ranks."""

        def look() -> int | None:
            return newest_checkpoint(global_store) if self._is_first else None

        return self._agree(look, "no checkpoint was looked for")[self._first_index]

    def _find(self, store: Store, step: int | None, check_complete: bool) -> Manifest | None:
        """One rank looks, so that all load the same, whatever is written or removed meanwhile."""
        if not self._is_first:
            return None
        return open_checkpoint(store, step, check_complete=check_complete).manifest

    @torch.no_grad()
    def _take_over(self, manifest: Manifest, wanted: Wanted, views: Mapping[str, memoryview]) -> None:
        there = self._optimizer_tensors(wanted)

        def tensor(key: str) -> Tensor:
            entry = manifest.tensors[key]
            if key not in there or spec_of("", there[key]) != Spec("", entry.dtype, entry.shape):
                return tensor_from(views[key], entry)
            fill(there[key], views[key], entry)  # fresh memory would cost more than the copy
            return there[key]

        for name, key in wanted.tensors.items():
            own = self.state.tensor(name)
            fill(own, views[key], manifest.tensors[key])
            own.grad = None
            if name in wanted.gradients:
                own.grad = tensor(wanted.gradients[name]).to(own)
        if self.optimizer is None:
            self.loaded_before_optimizer = (
                f"checkpoint {manifest.facts.step}" if "groups" in manifest.trees else ""
            )
        elif wanted.groups is not None:
            unpack_optimizer(self.optimizer, wanted.optimizer, wanted.groups, tensor)
        scale = unpack(manifest.trees.get("loss_scale", {"dict": []}), tensor)
        if scale and self.loss_scale.checks_overflow:
            self.loss_scale.load_state_dict(scale)
        if manifest.facts.seed is not None:
            self.trainer.seed = manifest.facts.seed
        self.trainer.iteration = manifest.facts.iteration
        if manifest.facts.plan is not None:
            self._job = self._job or manifest.facts.job
            if manifest.facts.plan.batch_size != self.plan.batch_size:
                log.warning(
                    "the checkpoint's steps had %d samples, this job's have %d: step %d of the data order is "
                    "another place in the data now",
                    manifest.facts.plan.batch_size,
                    self.plan.batch_size,
                    manifest.facts.iteration,
                )
        self._unclaimed = {name: unpack(tree, tensor) for name, tree in wanted.registered.items()}
        for name, thing in self._registered.items():
            if name in self._unclaimed:
                thing.load_state_dict(self._unclaimed.pop(name))
            elif manifest.facts.plan is not None:
                log.warning("checkpoint %s has no %r: left as it is", manifest.facts.step, name)

    def _optimizer_tensors(self, wanted: Wanted) -> dict[str, Tensor]:
        """The tensors that the optimizer has now, under the keys that a checkpoint would give them."""
        found: dict[str, Tensor] = {}
        if self.optimizer is not None:
            for parameter, key in wanted.optimizer_keys.items():
                pack(dict(self.optimizer.state.get(parameter, {})), key, found)
        return found

    # ------------------------------------------------------------ together with the other ranks

    def _agree(self, act: Callable[[], Value], what: str) -> list[Value]:
        """Every rank's result; where any rank fails, all raise the same error, with its reason."""

        def error(failures: Sequence[RankFailure], _: Exception | None) -> Exception:
            kind = (
                StoreTaken if all(failure.kind == "StoreTaken" for failure in failures) else CheckpointError
            )
            reasons = [f"{self._describe(failure.rank)}: {failure.message}" for failure in failures]
            return kind(f"{what}: {'; '.join(dict.fromkeys(reasons))}")

        return self.session.agree(act, error)

    def _agree_on_own(self, act: Callable[[], Value], what: str) -> Value:
        """This rank's result, once all ranks have one; what it is the others need not see."""
        results: list[Value] = []
        self._agree(lambda: results.append(act()), what)
        return results[0]

    @property
    def _is_first(self) -> bool:
        return self.session.stage == 0 and self.session.replica == 0

    @property
    def _first_index(self) -> int:
        return self.plan.ranks.index(self.session.stage_map[0][0])

    @property
    def _index(self) -> int:
        """This rank's place in what `gather` returns."""
        return self.plan.ranks.index(self.session.rank)

    @property
    def _me(self) -> str:
        return self._describe(self.session.rank)

    def _describe(self, rank: int) -> str:
        stage, replica = place_in_map(self.session.stage_map, rank)
        return f"rank {rank} (stage {stage}, replica {replica})"

    @property
    def _writer(self) -> str:
        return f"stage-{self.session.stage}-replica-{self.session.replica}"

    def _places(self) -> list[tuple[int, int]]:
        return [place_in_map(self.session.stage_map, rank) for rank in self.plan.ranks]

    def _writers(self, shard: bool) -> list[str]:
        all_of_them = shard or self.shards_optimizer
        return [
            f"stage-{stage}-replica-{replica}"
            for stage, replica in self._places()
            if all_of_them or not replica
        ]


def claim_after_own(store: Store, owner: Owner) -> Claim:
    """Waits for an earlier run of the same job, which may have been cut off and is about to end."""
    deadline = time.monotonic() + EARLIER_RUN_SECONDS
    while True:
        try:
            return store.claim(owner)
        except StoreTaken as taken:
            if not taken.by_this_job or time.monotonic() >= deadline:
                raise
        time.sleep(0.1)


def _check_alike(words: Sequence[Word]) -> None:
    moments = {(word.facts.step, word.facts.iteration) for word in words}
    if len(moments) > 1:
        raise CheckpointError(
            f"the ranks are not at the same point: they would save (step, iteration) {sorted(moments)} "
            "(call checkpoint on all ranks after the same step, with the same step number)"
        )
    for name in sorted({name for word in words for name in word.registered}):
        if len({word.registered.get(name) for word in words}) > 1:
            raise CheckpointError(
                f"what is registered as {name!r} has another state on other ranks, or is not there, and a "
                "checkpoint keeps one for all (register what is the same on every rank, whatever the layout)"
            )


def _pass_on(ended: "Future[Any]", done: "Future[str]", place: str) -> None:
    error = ended.exception()
    if error is None:
        done.set_result(place)
    else:
        done.set_exception(error)
