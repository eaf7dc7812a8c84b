"""Saves of a wrapped model: by the script, on request, and by the autosave timer; and loads."""

import logging
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from varuna.checkpoint.place import describe_place
from varuna.environment import VarunaEnvironment, variable_name
from varuna.errors import CheckpointError, PeerLost, StoreTaken
from varuna.execute.device.facts import available_bytes
from varuna.execute.device.profiled import profiled
from varuna.execute.step.trainer import Trainer
from varuna.morph.run.progress_page import ProgressWriter
from varuna.observe.trace_file import StepTracer
from varuna.train.process_rank import find_local_size
from varuna.train.saving.checkpoints import Checkpoints, PathLike
from varuna.train.saving.save_requests import BoundaryDecision, RankRequest, SaveRequests, decide, usr1

log = logging.getLogger("varuna")


class Saver:
    """Keeps checkpoints, requests, the autosave timer and the progress page of a job consistent."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        requests: SaveRequests,
        trainer: Trainer,
        progress: ProgressWriter,
        tracer: StepTracer,
    ) -> None:
        self.checkpoints = checkpoints
        self.requests = requests
        self._session = trainer.session
        self._trainer = trainer
        self._progress = progress
        self._tracer = tracer
        self._has_checked_store = self._session.rank != self._session.ranks[0]
        self._promised: list[Future[str]] = []  # futures of requested checkpoints

    def moved(self, checkpoints: Checkpoints, trainer: Trainer) -> "Saver":
        """Return the saver of the same process in the next layout."""
        found = Saver(checkpoints, self.requests, trainer, self._progress, self._tracer)
        found._promised, found._has_checked_store = self._promised, True
        return found

    def save(self, global_store: PathLike, *, autosave: bool = False, **options: Any) -> "Future[str]":
        started, iteration = time.perf_counter(), self._trainer.iteration
        try:
            with profiled("save"):
                done = self.checkpoints.save(global_store, autosave=autosave, **options)
        finally:
            self._tracer.note("save", started)
        seconds = time.perf_counter() - started
        self._use_store()
        timer, step = self.requests.autosave, options.get("step")
        step = iteration if step is None else step
        if step != iteration:
            timer.turn_off()
        timer.saved(done, seconds, autosave=autosave)
        self._progress.saves_every(timer.every_seconds)

        def report(ended: "Future[str]", progress: ProgressWriter = self._progress) -> None:
            if ended.exception() is None:
                progress.saved(step, seconds, write_seconds=time.perf_counter() - started - seconds)

        done.add_done_callback(report)
        return done

    def lose_ranks(self) -> None:
        """Cancel a background save: the ranks that are lost do not write their parts."""
        background = self.checkpoints.resources.background
        if background is not None and background.busy:
            why = "a rank was lost before its part was written"
            threading.Thread(target=background.cancel, args=(why,), daemon=True).start()

    def save_on_demand(self, global_store: PathLike) -> "Future[str]":
        """Request a save at the next step boundary."""
        promised: Future[str] = Future()
        self._promised.append(promised)
        self.requests.add(global_store)
        return promised

    def load(self, global_store: PathLike, iteration: int | None, **options: bool) -> int:
        step = self.checkpoints.load(global_store, iteration, **options)
        self._after_load(step)
        return step

    def _after_load(self, step: int) -> None:
        self._progress.uses(self.checkpoints.store)
        self._progress.note(self.checkpoints.recovery)
        if step != self._trainer.iteration:
            self.requests.autosave.turn_off()

    def resume(self, global_store: PathLike, *, force: bool = False) -> None:
        """Load the newest checkpoint that verifies, if there is one."""
        is_first, url = self._session.rank == self._session.ranks[0], os.fspath(global_store)
        place = describe_place(url) if is_first else ""  # first: the claim of the store makes its folder
        step = self.checkpoints.resume(global_store, force=force)
        if step is not None:
            self._after_load(step)
        elif is_first:
            iteration = self._trainer.iteration
            log.warning("no checkpoint in %s: %s. Training starts at step %d", url, place, iteration)
        self._use_store()

    def expect_no_store(self) -> None:
        """Do not warn that there is no store: the script saves and resumes by itself."""
        self._has_checked_store = True

    def warn_without_store(self) -> None:
        """Warn once, before the first step of a managed job, that it cannot survive a failure."""
        if self._has_checked_store:
            return
        self._has_checked_store = True
        environment = VarunaEnvironment.read(os.environ)
        is_managed = environment.agent_socket is not None
        if is_managed and not (self.checkpoints.store or environment.checkpoint_store):
            log.warning(
                "this job has no checkpoint store: after a failure or a change of machines that it cannot "
                "survive in place, it starts at step 0 (call model.resume(store) before the first step, or "
                "set %s)",
                variable_name("checkpoint_store"),
            )

    def close(self) -> None:
        self.checkpoints.resources.close()
        self._session.close()
        usr1.release(self.requests)

    def run_requests(self, *, has_order: bool = False, groups: str | None = None) -> bool:
        """Run the requests of all ranks. All ranks call this. Raises SystemExit if the job must end.

        `has_order`: this rank has an order to morph. `groups`: hash of the optimizer's groups, None if this
        rank cannot morph in place. Returns True if all ranks must enter the next generation now.
        """
        self._trainer.engine.where = f"stage {self._session.stage}, a save request between two steps"
        self._progress.on_demand(True)
        environment = VarunaEnvironment.read(os.environ)
        request = self.requests.take(
            default_store=self.checkpoints.store or environment.checkpoint_store,
            fits_in_memory=self.checkpoints.fits_in_memory(
                available_bytes(torch.device("cpu")),
                ranks_on_machine=find_local_size(os.environ),
            ),
        )
        request = replace(request, has_order=has_order, groups=groups)
        try:
            decision = decide(self._meet(request))
            self._carry_out(decision)
        except PeerLost:  # the ranks that are left may go on in place
            self.requests.put_back(request)
            self._progress.on_demand(False)
            raise
        self._progress.on_demand(False)
        return decision.morph

    def _meet(self, request: RankRequest) -> list[RankRequest]:
        self._progress.meets(True)
        try:
            return self._session.gather(request, RankRequest)
        finally:
            self._progress.meets(False)

    def _carry_out(self, decision: BoundaryDecision) -> None:
        """Do what all ranks have decided."""
        if decision.warning:
            log.error(decision.warning)
        if decision.autosave_to is not None:
            self._autosave(decision.autosave_to, decision.in_background)
        problem = decision.warning
        if decision.save_to is not None:
            problem = self._save_requested(decision.save_to, decision.exit)
        if decision.call_handler:
            self.requests.call_handler()
            problem = "the script's SIGUSR1 handler has returned, so the job goes on"
        if decision.exit and not problem:
            log.warning("SIGUSR1: a checkpoint was saved to %s; this rank exits", decision.save_to)
            usr1.script_handler = signal.SIG_IGN  # another signal during the exit must not kill
            self.close()
            raise SystemExit(0)
        if decision.signalled:
            self._progress.save_failed(problem)

    def _autosave(self, store: str, in_background: bool) -> None:
        tempdir = self.checkpoints.resources.tempdir if in_background else None
        try:
            self.save(store, autosave=True, tempdir=tempdir, gradients=True)
        except StoreTaken:  # another run continues this job: going on would train for nothing
            raise
        except CheckpointError as error:  # the same on all ranks
            log.error("the autosave failed: %s", error)
            self.requests.autosave.failed()

    def _save_requested(self, store: str, autosave: bool) -> str:
        """Save and complete the promised futures; return the error, which is also logged, or ""."""
        try:
            place = self.save(store, autosave=autosave, gradients=True).result()
        except CheckpointError as error:  # the same on all ranks; training can continue
            log.error("the requested checkpoint was not saved, training continues: %s", error)
            while self._promised:
                self._promised.pop().set_exception(error)
            return str(error)
        while self._promised:
            self._promised.pop().set_result(place)
        return ""

    def _use_store(self) -> None:
        """Autosave to the store that was used last, and report it."""
        self.requests.autosave.store = self.checkpoints.store
        self._progress.uses(self.checkpoints.store)
