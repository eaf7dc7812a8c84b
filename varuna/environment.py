"""Every VARUNA_* environment variable. No other file of the library names one."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Self

import msgspec

PREFIX = "VARUNA_"
MISSPELT = 0.7
"""Similarity from which an unknown name counts as a misspelt one, from 0 to 1."""
RUN_PREFIX = "VARUNA_RUN"
"""VARUNA_RUN_BATCH_SIZE is the option --batch-size of `varuna run`."""


class VarunaEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The VARUNA_* variables of a process. The field `chunk_size` is the variable VARUNA_CHUNK_SIZE.

    A variable that is not set, or set to the empty string, is None.
    """

    # Set for every worker, by `varuna run` and the launcher.
    stage_to_rank_map: str | None = None  # "0,2;1,3;"
    batch_size: int | None = None  # samples per step of the whole job
    replica_batch_size: int | None = None  # samples per step of this worker
    chunk_size: int | None = None  # samples per micro-batch
    resume_step: int | None = None  # checkpoint to load
    log_dir: str | None = None  # folder of logs of this job on this machine
    plan: str | None = None  # a `varuna.types.Proposal` as JSON
    profile: str | None = None  # folder of the profile
    saves: str | None = None  # a `varuna.morph.interval.SaveRhythm` as JSON
    manager_ip: str | None = None  # address of the manager's machine
    force_claim: str | None = None  # "1": take the store of checkpoints over from another job

    # Set by an agent for the workers of a managed job.
    job_id: str | None = None  # name of the job, the same in all its generations
    generation: int | None = None  # counts the starts of all workers
    machine: str | None = None  # as the machine list names it
    agent_socket: str | None = None  # abstract Unix socket that takes preemption notices
    progress_file: str | None = None  # shared memory page that the agent reads
    hot: str | None = None  # "1": workers that can morph in place wait for an order when a rank is lost
    joins: str | None = None  # "1": this worker joins a running job; it waits for a `varuna.types.MorphOrder`

    # Set by `varuna chaos` for its jobs.
    losses: str | None = None  # folder to which workers write the loss of each step

    # Set by users.
    checkpoint_store: str | None = None  # store of checkpoints on demand
    home: str | None = None  # saved job options and manager addresses; default: ~/.varuna
    cache: str | None = None  # cut positions and costs of models; default: ~/.cache/varuna
    track: str | None = None  # curves of a job without a manager: file, tensorboard, ...; see metrics
    debug: str | None = None  # "1": commands print full tracebacks
    nccl_on_shared_gpus: str | None = None  # "1", for tests: each rank has an NCCL_HOSTID of its own

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        values = {field: environment.get(variable_name(field)) or None for field in cls.__struct_fields__}
        for field in _WHOLE_NUMBERS:
            text = values[field]
            if text is not None and not text.isdecimal():
                raise ValueError(f"{variable_name(field)} must be a whole number, not {text!r}")
        return msgspec.convert(values, cls, strict=False)

    def write(self) -> dict[str, str]:
        """Return the variables that are set, as text."""
        values = msgspec.structs.asdict(self)
        return {variable_name(field): str(value) for field, value in values.items() if value is not None}


def variable_name(field: str) -> str:
    """Return the variable of a field of `VarunaEnvironment`, for messages."""
    assert field in VarunaEnvironment.__struct_fields__, field
    return PREFIX + field.upper()


def misspelt_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable that is not known and has almost the name of a known one.

    Other names that begin with VARUNA_ may belong to a script. `varuna run` checks those of its options.
    """
    known = [field.upper() for field in VarunaEnvironment.__struct_fields__]
    for variable in sorted(environment):
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known or variable.startswith(f"{RUN_PREFIX}_"):
            continue
        if found := difflib.get_close_matches(name, known, n=1, cutoff=MISSPELT):
            yield f"the environment variable {variable} is not known (did you mean {PREFIX}{found[0]}?)"


_WHOLE_NUMBERS = [name for name, kind in VarunaEnvironment.__annotations__.items() if kind == int | None]
