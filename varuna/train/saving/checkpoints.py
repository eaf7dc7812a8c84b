"""Saving and loading of a wrapped model on all ranks.

All ranks call `save` and `load` together. All succeed, or all raise the same error. After an error,
no checkpoint is incomplete, the model is unchanged, and training can continue.
"""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch

import varuna
from varuna.checkpoint.background import BackgroundSaver
from varuna.checkpoint.format.manifest import (
    Facts,
    Manifest,
    decode_manifest,
    decode_part,
    folder_of,
)
from varuna.checkpoint.format.part import lay_out
from varuna.checkpoint.format.tensors import as_plain, memory_of, spec_of
from varuna.checkpoint.load import Checkpoint, newest_complete, newest_whole
from varuna.checkpoint.recover import LoadRequest, describe_recovery, find_document, give_up
from varuna.checkpoint.save import commit, remove_old, remove_part, write_part
from varuna.checkpoint.select import LoadSelection, select
from varuna.checkpoint.store.claim import claim_after_earlier_run
from varuna.checkpoint.store.store import Claim, Owner, Store, open_store, retrying
from varuna.checkpoint.writer_process import SaveOrder
from varuna.environment import VarunaEnvironment
from varuna.errors import BrokenCheckpoint, CheckpointError, StoreOfOtherJob, StoreTaken
from varuna.execute.comm.collective import RankFailure
from varuna.execute.comm.session import Session
from varuna.train.saving.training_state import PartContent, RankSummary, TrainingState, check_summaries
from varuna.types import Plan, place_in_map

log = logging.getLogger("varuna")

RETRY_SECONDS = 60.0
"""Time during which a failed store operation is retried."""
FAILED_JOB_SECONDS = 20.0
"""Time that a failed job waits at its end for a running save."""
LONG_WAIT_FACTOR = 15.0
"""Other ranks wait this many times the timeout while a rank reads or writes."""
STATUS_SECONDS = 1.0
"""Time between two status exchanges while the ranks wait for an earlier save."""

AGREED_KINDS = {kind.__name__: kind for kind in (StoreTaken, StoreOfOtherJob, BrokenCheckpoint)}
"""Errors that all ranks raise as such if all failures are of the same kind."""

PathLike = str | os.PathLike[str]
Value = TypeVar("Value")


class PendingSave(NamedTuple):
    """A save on this rank, after all ranks have agreed on it."""

    store: Store
    facts: Facts
    content: PartContent
    writers: Sequence[str]  # all parts of the checkpoint
    keep_last: int | None

    @property
    def place(self) -> str:
        return f"{self.store.url}/{folder_of(self.facts.step)}"


@dataclass
class SaveResources:
    """Claims and the background process, to be released when the model is closed or collected.

    This must not refer to the model: a finalizer calls `close`, and would keep the model alive.
    """

    claims: dict[str, Claim] = field(default_factory=dict)
    background: BackgroundSaver | None = None
    tempdir: str = "memory"  # the place of its snapshots
    failed: bool = False  # the job has failed: other ranks may not write their parts

    def close(self) -> None:
        """Wait for a running save, then release the claims."""
        if self.background is not None:
            if self.failed and not self.background.wait(FAILED_JOB_SECONDS):
                self.background.cancel("the job has failed")
            self.background.close()
            self.background = None
        for claim in self.claims.values():
            claim.release()
        self.claims.clear()

    def release(self) -> None:
        """Release the claims, after a running save: another process is the first rank from now on."""
        if self.claims:
            self.close()

    def background_in(self, tempdir: str) -> BackgroundSaver:
        if self.background is None or self.tempdir != tempdir:
            if self.background is not None:
                self.background.close()
            self.background = BackgroundSaver(None if tempdir == "memory" else tempdir)
            self.tempdir = tempdir
        return self.background


def newest_checkpoint(global_store: PathLike) -> int | None:
    """Return the step of the newest complete checkpoint in a store, or None."""
    return newest_complete(open_store(os.fspath(global_store)))


class Agreement:
    """The ranks of a job, as one of them sees them during a save or load."""

    def __init__(self, session: Session, ranks: Sequence[int]) -> None:
        self._session = session
        self.places = [place_in_map(session.stage_map, rank) for rank in ranks]
        """(stage, replica) of each rank, in the order of gathered values."""
        self.index = ranks.index(session.rank)
        self.first = ranks.index(session.stage_map[0][0])
        """The index of the first replica of the first stage, which writes manifests."""
        self.is_first = self.index == self.first
        self.description = self._describe(session.rank)

    def run(self, act: Callable[[], Value], failure: str, kind: Any) -> list[Value]:
        """Return the results of all ranks, of type `kind`.

        If any rank fails, all raise the same error with its reason.
        """

        def error(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
            kinds = {one.kind for one in failures}
            kind = AGREED_KINDS.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
            reasons = [f"{self._describe(one.rank)}: {one.message}" for one in failures]
            return kind(f"{failure}: {'; '.join(reasons)}")

        return self._session.agree(act, error, kind)

    def run_on_first(self, act: Callable[[], Value], failure: str, kind: Any) -> Value:
        """Run on the first rank only; return its result, of type `kind`, on all ranks."""
        found = self.run(lambda: act() if self.is_first else None, failure, kind)[self.first]
        return found  # type: ignore[return-value]

    def run_locally(self, act: Callable[[], Value], failure: str) -> Value:
        """Return this rank's result, once all ranks have succeeded. Results are not exchanged."""
        results: list[Value] = []
        self.run(lambda: results.append(act()), failure, None)
        return results[0]

    def _describe(self, rank: int) -> str:
        stage, replica = place_in_map(self._session.stage_map, rank)
        return f"rank {rank} (stage {stage}, replica {replica})"


class Checkpoints:
    """Saves and loads one wrapped model."""

    def __init__(
        self,
        session: Session,
        plan: Plan,
        training: TrainingState,
        *,
        ties: Sequence[tuple[str, ...]],
        names: frozenset[str],  # all names in the whole model, with aliases
        timeout_seconds: float,
    ) -> None:
        self.training = training
        self.resources = SaveResources()
        self.store: str | None = None  # the store that was used last
        self._session = session
        self._plan = plan
        self._ties = ties
        self.names = names
        self._timeout_seconds = timeout_seconds
        self._ranks = Agreement(session, plan.ranks)
        self._running: Future[Any] | None = None  # this rank's background save
        self.job = ""
        self._token = uuid.uuid4().hex  # of this run's claims
        self.recovery = ""  # names the broken checkpoints that the last load set aside, on the first rank

    def moved(self, session: Session, plan: Plan, training: TrainingState) -> "Checkpoints":
        """Return the checkpoints of the same job and process in its next layout."""
        found = Checkpoints(
            session,
            plan,
            training,
            ties=self._ties,
            names=self.names,
            timeout_seconds=self._timeout_seconds,
        )
        found.resources, found.store, found.recovery = self.resources, self.store, self.recovery
        found._running, found.job, found._token = self._running, self.job, self._token
        return found

    def fits_in_memory(self, available_bytes: int | None, *, ranks_on_machine: int) -> bool:
        """Return whether memory can hold a snapshot of each rank on this machine."""
        if self.resources.background is not None or available_bytes is None:
            return True
        return 2 * self.training.num_bytes * ranks_on_machine < available_bytes

    def save(
        self,
        global_store: PathLike,
        *,
        step: int | None = None,
        tempdir: PathLike | None = None,
        shard: bool = False,
        keep_last: int | None = None,
        gradients: bool = False,
        autosave: bool = False,
    ) -> "Future[str]":
        """Save; the checkpoint is complete on return or, with `tempdir`, when the future is done.

        `gradients` also saves existing gradients, for a save between accumulated steps. Newer checkpoints
        replace an `autosave`.
        """
        step = self.training.trainer.iteration if step is None else step
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a whole number, 0 or more, not {step!r}")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be 1 or more, not {keep_last}")
        failure = f"checkpoint {step} was not written"
        store = open_retrying(global_store)
        with self._session.patient(LONG_WAIT_FACTOR):
            self._finish_earlier_save()
            summaries = self._ranks.run(lambda: self._summary(store, step, autosave), failure, RankSummary)
            check_summaries(summaries)
            self.training.find_first_stages(self._ranks.places)
            content = self._ranks.run_locally(
                lambda: self.training.content(
                    summaries,
                    self._ranks.index,
                    is_first=self._ranks.is_first,
                    shard=shard,
                    gradients=gradients,
                ),
                failure,
            )
            self.store = store.url
            facts = summaries[self._ranks.first].facts
            save = PendingSave(store, facts, content, self._writers(shard), keep_last)
            if tempdir is not None:
                return self._save_in_background(save, os.fspath(tempdir))
            self._save_now(save, failure)
        done: Future[str] = Future()
        done.set_result(save.place)
        return done

    def _save_now(self, save: PendingSave, failure: str) -> None:
        store, facts, content, writers, keep_last = save
        writes = self._writer in writers

        def write() -> bytes | None:
            if not writes:
                return None
            plain = {key: as_plain(key, tensor) for key, tensor in content.tensors.items()}
            specs = [spec_of(key, tensor) for key, tensor in plain.items()]
            layout = lay_out(specs, metadata={"format": "pt"})
            part = write_part(
                store, facts, self._writer, specs, layout, lambda key: memory_of(plain[key]), content.trees
            )
            return msgspec.json.encode(part)  # as in a file: JSON keeps ints of any size

        def finish() -> None:
            self._claim(store)  # the job may have continued without this run
            manifest = commit(
                store, [decode_part(part, "the part of a rank") for part in parts if part is not None]
            )
            try:
                remove_old(store, manifest, keep_last=keep_last)
            except OSError as error:  # the new checkpoint is complete
                log.warning("checkpoint %d is saved, but old ones were not removed: %s", facts.step, error)

        try:
            parts = self._ranks.run(write, failure, bytes)
        except CheckpointError:
            if writes:
                with suppress(OSError):
                    remove_part(store, facts, self._writer)
            raise
        # After a failure the manifest may exist: the parts stay.
        self._ranks.run_on_first(finish, failure, None)

    def _save_in_background(self, save: PendingSave, tempdir: str) -> "Future[str]":
        done: Future[str] = Future()
        if self._writer not in save.writers:
            done.set_result(save.place)
            return done
        specs = [spec_of(key, tensor) for key, tensor in save.content.tensors.items()]
        order = SaveOrder(
            url=save.store.url,
            retry_seconds=RETRY_SECONDS,
            facts=save.facts,
            writer=self._writer,
            trees=save.content.trees,
            commits=self._ranks.is_first,
            writers=save.writers,
            keep_last=save.keep_last,
            claim=self._token if self._ranks.is_first else "",
        )
        layout = lay_out(specs, metadata={"format": "pt"})
        background = self.resources.background_in(tempdir)
        self._running = background.start(order, specs, layout, save.content.tensors)

        def complete(ended: "Future[Any]") -> None:
            error = ended.exception()
            if error is None:
                done.set_result(save.place)
            else:
                done.set_exception(error)

        self._running.add_done_callback(complete)
        return done

    def _finish_earlier_save(self) -> None:
        """Wait for a running save on any rank; if it has failed on one rank, cancel it on all."""
        background = self.resources.background
        while True:
            if background is not None:
                background.wait(STATUS_SECONDS)
            states = self._session.gather(self._background_state(), str)
            failures = [state.removeprefix("failed: ") for state in states if state.startswith("failed")]
            if failures:
                if background is not None and background.busy:
                    background.cancel(failures[0])
                log.error("the checkpoint before this one was not saved: %s", failures[0])
            if failures or not any(states):
                self._running = None
                return

    def _background_state(self) -> str:
        """Return "" if no save is running on this rank, else "busy: ..." or "failed: ..."."""
        running, background = self._running, self.resources.background
        if running is None or background is None:
            return ""
        if running.done():
            error = running.exception()
            return "" if error is None else f"failed: {self._ranks.description}: {error}"
        limit = self._timeout_seconds
        if background.stalled_seconds > limit:
            return (
                f"failed: {self._ranks.description}: {background.activity} made no progress for {limit:g} s"
            )
        return f"busy: {background.activity}"

    def _summary(self, store: Store, step: int, autosave: bool) -> RankSummary:
        if self._ranks.is_first:
            self._claim(store)
        facts = Facts(
            step=step,
            iteration=self.training.trainer.iteration,
            attempt=uuid.uuid4().hex[:8],
            job=self._job_name(),
            fingerprint=self._plan.fingerprint,
            plan=self._plan,
            seed=self.training.trainer.seed,
            ties=tuple(self._ties),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            versions={"varuna": varuna.__version__, "torch": str(torch.__version__)},
            by_itself=autosave,
        )
        return self.training.summary(facts)

    def _job_name(self) -> str:
        """Return the name from the loaded checkpoint, else from the launcher, else a new one."""
        self.job = self.job or VarunaEnvironment.read(os.environ).job_id or uuid.uuid4().hex[:12]
        return self.job

    def _claim(self, store: Store, *, force: bool = False, wait: bool = True) -> None:
        claims = self.resources.claims
        if store.url in claims:
            claims[store.url].check()
            return
        owner = Owner(
            self._job_name(),
            self._token,
            socket.gethostname(),
            os.getpid(),
            since=time.time(),
            launch=VarunaEnvironment.read(os.environ).job_id or "",
        )
        claims[store.url] = claim_after_earlier_run(store, owner, force=force, wait=wait)

    def claim_early(self, global_store: PathLike | None, *, force: bool = False) -> None:
        """Claim the store before training, so that a second job on a claimed store is refused at its start.

        All ranks call this; the first rank's store counts, and None claims nothing. A store that cannot be
        written is only logged: the first save reports it.
        """

        def claim() -> None:
            if global_store is None:
                return
            environment, store = VarunaEnvironment.read(os.environ), open_retrying(global_store)
            try:
                newest, _ = newest_whole(store)
                if newest is not None and newest.facts.plan is not None:
                    self.job = self.job or newest.facts.job
                self._claim(store, force=force or environment.force_claim == "1", wait=False)
            except StoreTaken as taken:
                if not taken.by_this_launch:  # an earlier generation is about to end: the first save waits
                    raise
            except OSError as error:
                log.warning("checkpoints cannot be saved to %s: %s", store.url, error)

        with self._session.patient(LONG_WAIT_FACTOR):
            self._ranks.run_on_first(claim, "this job does not start", None)

    @property
    def _writer(self) -> str:
        return f"stage-{self._session.stage}-replica-{self._session.replica}"

    def _writers(self, shard: bool) -> list[str]:
        all_replicas = shard or self.training.shards_optimizer
        return [
            f"stage-{stage}-replica-{replica}"
            for stage, replica in self._ranks.places
            if all_replicas or not replica
        ]

    def load(
        self,
        global_store: PathLike,
        step: int | None,
        *,
        check_complete: bool = True,
        strict: bool = True,
        cast: bool = False,
    ) -> int:
        """Load a checkpoint and return its step. All data is read and checked before the model changes.

        Without a `step`, load the newest checkpoint that verifies on all ranks, and set broken ones aside.
        """
        request = LoadRequest(step, check_complete=check_complete, strict=strict, cast=cast)
        loaded = self._load(open_retrying(global_store), request)
        assert loaded is not None
        return loaded

    def resume(self, global_store: PathLike, *, force: bool = False) -> int | None:
        """Claim the store, load the newest checkpoint that verifies and return its step; None without any.

        Raises an error if another job writes to the store, or if all checkpoints of the store are broken.
        """
        self.claim_early(global_store, force=force)
        store = open_retrying(global_store)
        loaded = self._load(store, LoadRequest(None, required=False))
        self.store = store.url
        return loaded

    def _load(self, store: Store, request: LoadRequest) -> int | None:
        with self._session.patient(LONG_WAIT_FACTOR):
            verified = self._find_verified(store, request, "no checkpoint was loaded")
            if verified is None:
                return None
            manifest, chosen, views = verified
            self._ranks.run(
                lambda: self.training.restore(manifest, chosen, views),
                "a checkpoint was only partly loaded",
                None,
            )
        self.recovery = describe_recovery(request.set_aside, manifest.facts)
        if self.recovery:  # only the first rank knows
            log.error("%s: %s", store.url, self.recovery)
        self.store = store.url
        if (plan := manifest.facts.plan) is not None:
            self.job = self.job or manifest.facts.job
            if plan.batch_size != self._plan.batch_size:
                log.warning(
                    "the checkpoint's job had %d samples per step, this job has %d: step %d is now another "
                    "position in the data",
                    plan.batch_size,
                    self._plan.batch_size,
                    manifest.facts.iteration,
                )
        log.info("loaded checkpoint %s of %s", manifest.facts.step, store.url)
        return manifest.facts.step

    def _find_verified(
        self, store: Store, request: LoadRequest, failure: str
    ) -> tuple[Manifest, LoadSelection, dict[str, memoryview]] | None:
        """Return a checkpoint whose bytes are verified on all ranks; None if the store has none."""
        while True:
            # Only one rank looks, so that all load the same checkpoint while others write or remove some.
            document = self._ranks.run_on_first(partial(find_document, store, request), failure, bytes)
            if document is None:
                return None
            manifest = decode_manifest(document, "the manifest of the first rank")
            chosen = self._ranks.run_locally(partial(self._select, manifest, request), failure)
            views = self._read(store, manifest, chosen.keys, request, failure)
            if views is not None:
                return manifest, chosen, views

    def _select(self, manifest: Manifest, request: LoadRequest) -> LoadSelection:
        return select(
            manifest,
            self.training.stage,
            self.training.optimizer,
            ties=self._ties,
            names=self.names,
            strict=request.strict,
            complete=request.check_complete,
            cast=request.cast,
            hash_of_base=self.training.base.hash,
        )

    def _read(
        self, store: Store, manifest: Manifest, keys: Sequence[str], request: LoadRequest, failure: str
    ) -> dict[str, memoryview] | None:
        """Return the verified bytes of this rank, or None on all ranks if any rank found damage.

        Then the checkpoint is set aside, and the next newest one is to be tried.
        """
        views: dict[str, memoryview] = {}

        def read() -> str:
            for key, data in Checkpoint(store, manifest).read_each(keys):
                if isinstance(data, memoryview):
                    views[key] = data
                elif data.damaged:
                    return f"{self._ranks.description}: {data.text}"
                else:
                    raise CheckpointError(data.text)
            return ""

        problems = [problem for problem in self._ranks.run(read, failure, str) if problem]
        if not problems:
            return views
        problem = "; ".join(problems)
        self._ranks.run_on_first(lambda: give_up(store, manifest, problem, request), failure, None)
        return None


def open_retrying(global_store: PathLike) -> Store:
    return retrying(open_store(os.fspath(global_store)), seconds=RETRY_SECONDS, on_wait=log.warning)
