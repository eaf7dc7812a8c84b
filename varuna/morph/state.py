"""State of a job as the manager sees it."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Literal

import msgspec

from varuna.morph.failures import WorkerFailure
from varuna.morph.policy import ChangeHistory, MachineStay
from varuna.types import Layout

Phase = Literal["gathering", "running", "morphing", "saving", "ending", "over"]
"""
    gathering   no worker runs; the manager waits for machines, a plan and a checkpoint
    running     the workers of one generation start or train
    morphing    the workers enter the next generation in place, without a checkpoint
    saving      the workers save a checkpoint and exit
    ending      the workers are killed; the manager waits until every reachable agent confirms it
    over        the job has ended
"""


class ManagerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits and retry limits of the manager."""

    morphs: bool = True  # False: keep the first machines, and end the job at the first failure
    hot: bool = False  # workers that can morph in place keep their processes and their state
    greedy: bool = False  # change at every chance; False: only if it is worth it (varuna.morph.policy)
    prepare_seconds: float = 600.0  # joiners must build their model within this time
    morph_seconds: float = 60.0  # a morph without progress for this long, and `hang_steps` step times, hangs
    replan_seconds: float = 10.0  # limit of a plan for the survivors of a loss
    report_seconds: float = 1.0  # after a loss, survivors of a young generation may report for this long
    hold_seconds: float = 45.0  # survivors that are too few wait this long for another machine
    join_limit: int = 3  # failures of joiners in a row; after them, machines join by a restart
    settle_seconds: float = 0.75  # plan a change only after the machines stayed the same for this long
    gather_seconds: float = 30.0  # a new job waits this long for all its machines
    start_seconds: float = 60.0  # an agent must connect within this time after its start
    lost_seconds: float = 1.35  # a machine without a heartbeat for this long is lost
    attach_seconds: float = 10.0  # agents must find a restarted manager within this time
    save_seconds: float = 60.0  # limit until a save begins; a notice can set an earlier deadline
    postpone_seconds: float = 10.0  # first wait after a failed save; it doubles each time
    postpone_limit: float = 300.0  # longest wait after a failed save
    end_seconds: float = 10.0  # an agent must confirm that its workers are killed within this time
    begin_seconds: float = 10.0  # an agent must report workers that it has to start within this time
    second_hand_seconds: float = 2.0  # wait this long for the failure that caused the reported ones
    crash_limit: int = 3  # crashes without progress that are retried; one more ends the job
    setback_limit: int = 16  # crashes that are retried if workers repeat steps, and make no new one
    flap_seconds: float = 600.0  # forget losses of a machine that are older than this
    hang_steps: float = 10.0  # a step without progress for this many step times is a hang
    hang_seconds: float = 60.0  # lower limit of the time above
    stacks_seconds: float = 0.5  # wait this long for the stack traces of a hang
    idle_seconds: float = 900.0  # lower limit for a hang between steps
    first_step_seconds: float = 1800.0  # lower limit for a hang from wrapping the model to the first step


class Member(msgspec.Struct, frozen=True):
    """A machine that is in the machine list, or that still has an agent."""

    name: str
    listed: bool = True
    agent: str = ""  # id of the connected agent; "" if none is connected
    address: str = ""  # address that other machines use
    seen: float = 0.0  # time of the last heartbeat
    warm: bool = False  # the fork server has imported torch
    store_port: int = 0  # port of the rendezvous store for the next generation; 0: none yet
    starting: float | None = None  # time at which the agent's start began
    began_at: float = 0.0  # start of its agent, until it is ready; 0: not known
    retry_at: float = 0.0  # do not start an agent before this time
    start_failures: int = 0  # failed starts in a row
    welcome_at: float = 0.0  # a flapping machine is not used before this time
    trial_until: float = 0.0  # it tends to leave again, and is not used before this time
    dismissed_at: float | None = None  # time at which its agent was ordered to exit
    kept: bool = False  # not listed any more, but used until the machines of the list can do without it
    successors: tuple[str, ...] = ()  # machines that were listed when this one was removed
    ready_at: float = 0.0  # time at which it last became usable
    leave_by: float | None = None  # deadline of a notice; the machine gets no new work
    leave_at: float = 0.0  # a machine with a notice works until then
    drained: bool = False  # not used until it is removed from the list and added again
    released: bool = False  # the agent knows that the machine is no longer needed
    workers: int | None = None  # generation whose workers run, or may run, on it

    @property
    def leaves(self) -> bool:
        return self.drained or self.leave_by is not None


class Generation(msgspec.Struct, frozen=True, dict=True):
    """One start of the job's workers on a set of machines. Lookups of thousands of machines are kept."""

    number: int
    machines: tuple[str, ...]  # machines that have ranks
    ranks: tuple[tuple[int, ...], ...]  # ranks of each machine
    agents: tuple[str, ...]  # agent id of each machine
    layout: Layout
    resume_step: int | None
    master_addr: str
    master_port: int
    plan: str = ""  # full text of the plan, for comparison with later plans
    environment: Mapping[str, str] = {}  # variables that the planner sets for workers

    @cached_property
    def machine_set(self) -> frozenset[str]:
        return frozenset(self.machines)

    @cached_property
    def ranks_of(self) -> Mapping[str, tuple[int, ...]]:
        """Ranks of each machine, in order."""
        return dict(zip(self.machines, self.ranks, strict=True))

    @cached_property
    def _machine_of(self) -> Mapping[int, str]:
        places = zip(self.machines, self.ranks, strict=True)
        return {rank: machine for machine, ranks in places for rank in ranks}

    def machine_of(self, rank: int) -> str | None:
        return self._machine_of.get(rank)


def match_ranks(
    last: Generation, following: Generation, lost: Collection[int]
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Return the old rank of each new rank (None: a joiner), and the old ranks that leave.

    A worker keeps its machine and its device. The workers that are left on a machine keep their order.
    """
    previous: list[int | None] = [None] * following.layout.num_ranks
    for machine, ranks in zip(following.machines, following.ranks, strict=True):
        left = [old for old in last.ranks_of.get(machine, ()) if old not in lost]
        for rank, old in zip(ranks, left, strict=False):
            previous[rank] = old
    gone = {*previous, *lost}
    return tuple(previous), tuple(rank for ranks in last.ranks for rank in ranks if rank not in gone)


class Preparation(msgspec.Struct, frozen=True):
    """The next generation while its joiners build their model and the current one trains."""

    generation: Generation
    joiners: tuple[str, ...]  # machines that the current generation does not have
    deadline: float
    leave_by: float  # earliest deadline of a notice when it began
    why: str
    reasons: tuple[str, ...] = ()  # "what: why" lines about the plan


class MachinePlan(msgspec.Struct, frozen=True):
    """The planner's answer for a set of machines; `problem` says why there is no layout."""

    machines: tuple[str, ...]  # machines that the planner could use
    used: tuple[str, ...] = ()  # machines that have ranks
    ranks: tuple[tuple[int, ...], ...] = ()  # ranks of each used machine
    layout: Layout | None = None
    plan: str = ""
    environment: Mapping[str, str] = {}
    problem: str = ""
    reasons: tuple[str, ...] = ()  # "what: why" lines for the log
    devices: int = 0  # of each machine that the planner could use; 0: all

    def is_for(self, machines: tuple[str, ...], devices: int = 0) -> bool:
        return (self.machines, self.devices) == (machines, devices)

    def same_as(self, generation: Generation) -> bool:
        assert self.layout is not None
        ours, theirs = (
            (layout.stage_map, layout.microbatch_size) for layout in (self.layout, generation.layout)
        )
        placed, running = (self.used, self.ranks), (generation.machines, generation.ranks)
        return (placed, ours, self.plan) == (running, theirs, generation.plan)


class Outcome(msgspec.Struct, frozen=True):
    """The end of one worker."""

    failure: WorkerFailure | None  # None: it exited normally
    on_demand: bool = False  # it saved and exited on request
    last_lines: str = ""  # end of its stderr, if it failed
    entered: int = 0  # generation that it was in, or handed its state over to; 0: a joiner, or not known


class CodeIdentity(msgspec.Struct, frozen=True):
    """The code that a worker runs. Workers of one job must have the same."""

    varuna: str = ""  # version
    torch: str = ""  # version
    script: str = ""  # hash of the file
    model: str = ""  # fingerprint of the captured model; "": not known yet


class MorphParts(msgspec.Struct):
    """Seconds of the parts of a morph in place on one rank; the rest builds what trains and saves."""

    waited: float = 0.0  # from the notice of a loss to the order
    rebuild: float = 0.0  # agreement with the survivors, groups, links
    move: float = 0.0  # tensors

    def __str__(self) -> str:
        waited = f"waited {self.waited:.3f} s, " if self.waited else ""
        return f"{waited}groups and links {self.rebuild:.3f} s, tensors {self.move:.3f} s"


class WorkerFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts of a worker that rarely change. 0 or "": unknown."""

    num_steps: int = 0  # at which the training ends
    memory_bytes: int = 0  # peak of its device; on a CPU, present memory of the process
    memory_limit: int = 0
    flops_per_sample: float = 0.0  # of the whole model, forward and backward
    peak_flops: float = 0.0  # of its device per second, in the precision of the training
    device: str = ""


class WorkerProgress(msgspec.Struct, frozen=True):
    """Progress of one worker, read by its agent from the shared progress page."""

    rank: int
    pid: int = 0
    iteration: int = 0
    steps: int = 0  # steps of this process
    missing_samples: int = 0  # that its steps were short of full batches
    activity: int = 0  # counts steps, evaluations and checkpoints
    step_age: float = 0.0  # seconds from the end of its last step to this report
    in_step: bool = False
    compute_seconds: float = 0.0  # compute time of the last step, without waiting
    step_seconds: float = 0.0  # time between the starts of the last two steps
    saved_step: int = -1
    save_seconds: float = 0.0
    write_seconds: float = 0.0  # after that, until the checkpoint was complete
    save_every_seconds: float = 0.0  # autosave interval; 0: off or unknown
    script_saves: bool = False  # the library cannot save on request: only the script may
    store: str = ""
    note: str = ""  # broken checkpoints that were set aside, and the steps that are lost
    saving: bool = False  # a requested save is running
    failed_saves: int = 0  # requested saves that failed, so that training continues
    save_problem: str = ""  # why the last of them failed
    hot: bool = False  # it can morph in place
    why_not: str = ""  # why it cannot
    replicated: bool = True  # every replica of a stage holds the whole state of the stage
    waits: bool = False  # it waits for an order: a joiner is prepared, or a survivor has abandoned its step
    generation: int = 0  # that it is in, once an order is carried out that of the order; 0: a joiner
    taken: int | None = None  # generation of the last order that it has begun to carry out; None: not known
    code: CodeIdentity = CodeIdentity()
    copy_of: int | None = None  # rank whose state it has a copy of, if stages have no replicas
    morph_seconds: float = 0.0  # pause of its last morph
    morph_parts: MorphParts = msgspec.field(default_factory=MorphParts)
    morph_bytes: int = 0  # bytes that it received in its last morph
    facts: WorkerFacts = WorkerFacts()


Heartbeat = tuple[str, int | None, tuple[WorkerProgress, ...]]
"""Agent id, generation of its live workers, and their progress."""


class JobVerdict(msgspec.Struct, frozen=True):
    """Result of the job."""

    how: Literal["finished", "failed", "stopped"]
    exit_code: int
    reason: str


class JobState(msgspec.Struct, frozen=True):
    settings: ManagerSettings = ManagerSettings()
    phase: Phase = "gathering"
    since: float = 0.0  # start of this phase
    reason: str = "the job starts"  # reason for this phase
    members: Mapping[str, Member] = {}
    usable: tuple[str, ...] = ()  # machines that can run workers now
    changed_at: float = 0.0  # last change of `usable`
    present: tuple[str, ...] = ()  # machines with a connected agent, warm or not
    present_at: float = 0.0  # last change of `present`
    generation: Generation | None = None  # the current generation, or the last one
    next_number: int = 1
    ended: Mapping[str, tuple[Outcome, ...]] = {}  # machines of the generation without live workers
    failures: tuple[Outcome, ...] = ()  # failures of the generation, in order of arrival
    failed_at: float = 0.0  # arrival of the first failure
    deadline: float = 0.0  # limit of the phases morphing, saving and ending
    planning_for: tuple[str, ...] | None = None  # machines of the running plan request
    planning_devices: int = 0  # devices of each of these machines; 0: all
    proposal: MachinePlan | None = None  # the latest plan
    unplannable: tuple[str, ...] = ()  # the last machines without a plan
    absences: Mapping[str, tuple[float, ...]] = {}  # times at which a machine was lost or dismissed, recently
    stays: Mapping[str, tuple[MachineStay, ...]] = {}  # the last ones of each machine
    finding_checkpoint: bool = False
    resume_step: int | None = None  # --resume_step, for the first generation
    wait_until: float = 0.0  # backoff after crashes: no launch before this time
    crashes: int = 0  # crashes since the last progress
    iteration: int = 0  # of the current generation
    missing_samples: int = 0  # that the steps of these workers were short of full batches
    stepped_at: float = 0.0  # end of that step; what came after it is lost if the next one is interrupted
    best_iteration: int = 0  # of all generations
    first_iteration: int = (
        0  # at which the workers of this generation have begun; the script may load a checkpoint
    )
    iteration_at_crash: int = 0
    setbacks: int = 0  # crashes since the best iteration was last passed
    reports_entered: Mapping[str, tuple[WorkerProgress, ...]] = {}  # when all entered the last one in place
    progressed_at: float = 0.0  # last progress of this generation
    stacks_at: float = 0.0  # last request for stack traces
    progress: Mapping[str, tuple[WorkerProgress, ...]] = {}  # last report of each machine of the generation
    activity: int = 0
    in_step: bool = False
    step_seconds: float = 0.0
    store: str = ""  # checkpoint store of the job
    broken_step: int | None = None  # the last checkpoint that workers could not load and set aside
    note: str = ""  # the last worker's note about broken checkpoints
    saved_step: int = -1
    save_seconds: float = 0.0
    write_seconds: float = 0.0
    save_every_seconds: float = 0.0
    losses: int = 0  # lost machines and failed workers since the job started
    seconds_before: float = 0.0  # run time of earlier managers of this job
    attach_until: float = 0.0  # until then agents of an earlier manager may connect; start no second one
    verdict: JobVerdict | None = None  # result of the job, reported once all workers have ended
    save_requested: bool = False  # workers of this generation that save and exit may do so on our request
    saving_now: bool = False  # a worker runs a requested save
    script_saves: bool = False  # the library cannot save on request: only the script may
    failed_saves: int = 0  # requested saves of this generation that failed
    failed_before: int = 0  # how many before the last request; -1: not known yet
    save_problem: str = ""  # why the last of them failed
    postponed: str = ""  # reason of the change that waits because the job cannot save; "": none
    postponed_step: int = -1  # newest saved step at that time
    postponements: int = 0  # in a row
    retry_change_at: float = 0.0  # do not try the change before this time
    problems: Mapping[str, str] = {}  # by topic; `varuna status` shows them
    preparation: Preparation | None = None  # only in the phase running, or while survivors hold their state
    joiners: Mapping[str, tuple[WorkerProgress, ...]] = {}  # last report of each joiner
    join_failures: int = 0  # in a row
    joined: tuple[int, ...] = ()  # ranks that have joined the running generation, and report no step yet
    retry_join_at: float = 0.0  # prepare no joiner before this time
    leaving: tuple[str, ...] = ()  # machines whose workers hand their state over, or are killed, and end
    leaving_since: float = 0.0
    lost: Mapping[str, str] = {}  # lost machines of the generation that its survivors replace, and why
    holding: bool = False  # survivors that are too few keep their state until another machine joins
    morphed_from: Generation | None = None  # in the phase morphing: the generation before
    morph_lost: tuple[int, ...] = ()  # its ranks that were lost before the morph; see `commands.Morph`
    morph_whole: bool = True  # before the morph, each replica of a stage held the whole state of the stage
    morph_base: Generation | None = None  # in the phase morphing: the last generation that was entered
    morph_holds: tuple[tuple[int, ...], ...] = ()  # ranks of it whose state each rank has; (): only its own
    morph_begun_at: float = 0.0  # all workers have begun to carry out their orders; 0: not yet
    morph_broken: str = ""  # why the morph that runs cannot be completed, though no rank of it is lost
    slow_morph: str = ""  # planned change in place that took too long: the next ones save and restart
    history: ChangeHistory = ChangeHistory()  # changes of machines so far
    waiting: str = ""  # change that is not worth it yet, and why; "": none
    wait_over_at: float = 0.0  # it is, after this time

    @property
    def active(self) -> bool:
        """True while workers may be alive."""
        return self.phase in ("running", "morphing", "saving", "ending")
