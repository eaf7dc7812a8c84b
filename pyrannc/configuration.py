"""Options from `rannc_conf.toml`, from RANNC_* environment variables, and from arguments; later ones win.

The file is in ~/.pyrannc, or in the folder RANNC_CONF_DIR. This module imports no torch.
"""

import difflib
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

log = logging.getLogger("pyrannc")

FILE = "rannc_conf.toml"

Number = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Counts = Annotated[tuple[Positive, ...], Meta(min_length=1)]


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """All options that have an effect, with their defaults."""

    partition_num: Number = 0  # stages; 0: chosen automatically
    replica_num: Number | Counts = 0  # of every stage, or one number for each stage; 0: chosen automatically
    pipeline_num: Number = 0  # micro-batches of each replica's batch; 0: chosen automatically
    min_pipeline: Positive = 1
    max_pipeline: Positive = 32
    min_pipeline_bs: Positive = 1  # samples in the smallest micro-batch
    checkpointing: bool | None = None  # recompute in the backward; None: only where memory requires it
    dp_search_all: bool = False  # the fastest of all layouts, even if the model fits in one stage
    mem_margin: Share = 0.1  # share of each device's memory to leave free
    mem_limit_gb: Annotated[float, Meta(ge=0)] = 0.0  # of each device; 0: all of it
    opt_param_factor: Annotated[float, Meta(ge=0)] = 2.0  # optimizer state, as a multiple of the parameters
    measure: bool = True  # measure segments before choosing; False: estimate them from their shapes
    measure_seconds: Annotated[float, Meta(gt=0)] = 3.0  # after this time, the rest is estimated
    profiling_iter: Positive = 3  # least number of timed runs of each segment
    save_graph_profile: bool = False
    load_graph_profile: bool = False
    graph_profile_file: str = "/tmp/rannc_graph_profile.json"
    save_deployment: bool = False
    load_deployment: bool = False
    deployment_file: str = "/tmp/rannc_deployment.json"
    trace_events: bool = False
    event_trace_file: str = "/tmp/rannc_event_trace.json"
    sync_params_on_init: bool = True
    show_config_items: bool = False


OTHER_OPTIONS = """
alloc_repl_flat alloc_solutions_file_prefix auto_parallel checkpointing_no_last coarsen_by_time
consolidate_grads decomposer disable_balancing display_act_value display_comm_value do_coarsening
do_uncoarsening dump_dp_cache dump_dp_node_profiles dump_graph dump_graph_prefix enable_kineto
force_dist_matmul graph_profiling limit_dev_num_more_than_bs limit_dev_num_pot load_alloc_solutions
load_mlpart_results max_mp_num max_partition_num min_partition_num mlpart_results_file p2p_comm
partitioning_dry_run_np profile_by_acc profile_dump_path profiler_cache_size profiling run_watchdog
save_alloc_solutions save_mlpart_results skip_grad_scaling sync_allreduce use_mpi_to_gather_dist_params
use_named_tensors validate_comm verify_partitioning verify_recomp watchdog_lockfile_dir
"""
WITHOUT_EFFECT = frozenset(OTHER_OPTIONS.split())
"""Options of RaNNC for what this library always does, does differently, or does not need."""

OPTION_TYPES: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Configuration)}
DEFAULTS = Configuration()


class OriginalArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of RaNNC's `RaNNCModule` that are none of the options, by their names in its versions."""

    enable_apex_amp: bool = False  # the same as use_amp_master_params
    enable_zero: bool = False  # the same as shard_optimizer
    offload_params: bool = False
    allreduce_amp_master_params: bool = False  # gradients are reduced in the precision of the parameters
    allreduce_amp_master_param: bool = False
    check_unused_values: bool = True  # values that nobody uses are dropped from the graph


def take_arguments(options: dict[str, object]) -> OriginalArguments:
    """Remove RaNNC's own arguments from `options` and return them."""
    fields = {field.name for field in msgspec.structs.fields(OriginalArguments)}
    found = OriginalArguments(**{name: bool(options.pop(name)) for name in fields & options.keys()})
    if found.offload_params:
        raise ValueError(
            "offload_params=True is not supported: parameters stay on the device (use more stages, "
            "partition_num=..., or shard_optimizer=True)"
        )
    return found


def read_configuration(
    environment: Mapping[str, str], home: Path, arguments: Mapping[str, object]
) -> Configuration:
    path, from_file = folder_of(environment, home) / FILE, {}
    try:
        from_file = tomllib.loads(path.read_text())
    except FileNotFoundError:
        pass
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    from_environment = {
        name.removeprefix("RANNC_").lower(): text
        for name, text in environment.items()
        if name.startswith("RANNC_") and name != "RANNC_CONF_DIR"
    }
    found: dict[str, object] = {}
    for source, settings in (
        (str(path), from_file),
        ("the environment", from_environment),
        ("the arguments of RaNNCModule", arguments),
    ):
        for key, value in settings.items():
            if key in OPTION_TYPES:
                found[key] = _checked(key, value, source)
            elif key in WITHOUT_EFFECT:
                log.info("%s, in %s, has no effect", key, source)
            else:
                near = difflib.get_close_matches(key, [*OPTION_TYPES, *WITHOUT_EFFECT], n=1)
                suggestion = f"did you mean {near[0]}?" if near else "docs/pyrannc.md lists them"
                log.warning("%s, in %s, is not an option (%s)", key, source, suggestion)
    configuration = Configuration(**found)  # type: ignore[arg-type]
    if configuration.max_pipeline < configuration.min_pipeline:
        raise ValueError(
            f"max_pipeline {configuration.max_pipeline} is smaller than min_pipeline "
            f"{configuration.min_pipeline} (raise max_pipeline, or lower min_pipeline)"
        )
    if configuration.show_config_items:
        for key, value in found.items():
            log.info("%s = %s", key, value)
    return configuration


def folder_of(environment: Mapping[str, str], home: Path) -> Path:
    named = environment.get("RANNC_CONF_DIR")
    if not named:
        return home / ".pyrannc"
    if not Path(named).is_dir():
        raise ValueError(
            f"RANNC_CONF_DIR is {named!r}, which is not a folder (expected the folder of {FILE})"
        )
    return Path(named)


def _checked(key: str, value: object, source: str) -> object:
    expected = type(getattr(DEFAULTS, key)) if getattr(DEFAULTS, key) is not None else bool
    read = value
    if isinstance(value, str) and expected is bool:
        read = {"1": True, "0": False, "true": True, "false": False}.get(value.lower(), value)
    elif isinstance(value, str) and key == "replica_num" and "+" in value:
        read = [count.strip() for count in value.split("+")]
    try:
        return msgspec.convert(read, OPTION_TYPES[key], strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        form = ' (expected one number for all stages, or one for each stage: [1, 3] or "1+3")'
        raise ValueError(
            f"{key}, in {source}, is {value!r}: {error}{form if key == 'replica_num' else ''}"
        ) from None
