"""Configuration, logging, and who a process is: told by files and the environment."""

import logging
from pathlib import Path

import pytest

from pyrannc.configuration import OPTION_TYPES, Configuration, read_configuration
from pyrannc.logs import configure_logging
from pyrannc.process import find_rank


def test_every_option_can_be_set_by_file_environment_and_argument(tmp_path: Path) -> None:
    """R15: arguments win over the environment, that over the file."""
    folder = tmp_path / ".pyrannc"
    folder.mkdir()
    values = {
        "partition_num": 2, "replica_num": 3, "pipeline_num": 4, "min_pipeline": 2, "max_pipeline": 8,
        "min_pipeline_bs": 2, "checkpointing": True, "mem_margin": 0.2, "mem_limit_gb": 1.5,
        "opt_param_factor": 1.0, "dp_search_all": True, "measure": False, "measure_seconds": 2.5,
        "profiling_iter": 1, "save_graph_profile": True, "load_graph_profile": True,
        "graph_profile_file": "p", "save_deployment": True, "load_deployment": True, "deployment_file": "d",
        "trace_events": True, "event_trace_file": "t", "sync_params_on_init": False,
        "show_config_items": True,
    }  # fmt: skip
    assert values.keys() == OPTION_TYPES.keys()
    lines = [
        f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for key, value in values.items()
    ]
    (folder / "rannc_conf.toml").write_text("\n".join(lines))
    assert read_configuration({}, tmp_path, {}) == Configuration(**values)  # type: ignore[arg-type]
    environment = {f"RANNC_{key.upper()}": str(value) for key, value in values.items()}
    assert read_configuration(environment, tmp_path / "none", {}) == Configuration(**values)  # type: ignore[arg-type]
    assert read_configuration({"RANNC_PIPELINE_NUM": "7"}, tmp_path, {}).pipeline_num == 7
    assert read_configuration({"RANNC_PIPELINE_NUM": "7"}, tmp_path, {"pipeline_num": 9}).pipeline_num == 9
    moved = {"RANNC_CONF_DIR": str(folder)}
    assert read_configuration(moved, tmp_path / "none", {}).partition_num == 2


def test_an_unknown_key_warns_and_a_bad_value_names_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R15."""
    (tmp_path / "rannc_conf.toml").write_text("partion_num = 2\nprofiling = false\n")
    read_configuration({"RANNC_CONF_DIR": str(tmp_path)}, tmp_path, {})
    assert "partion_num" in caplog.text and "did you mean partition_num?" in caplog.text
    assert "profiling" not in caplog.text  # an option of RaNNC: no warning
    for environment, key in (
        ({"RANNC_MEM_MARGIN": "much"}, "mem_margin"),
        ({"RANNC_MEM_MARGIN": "1.5"}, "mem_margin"),
        ({"RANNC_TRACE_EVENTS": "perhaps"}, "trace_events"),
        ({"RANNC_PIPELINE_NUM": "-1"}, "pipeline_num"),
        ({"RANNC_CONF_DIR": "/nowhere/at/all"}, "RANNC_CONF_DIR"),
    ):
        with pytest.raises(ValueError, match=key):
            read_configuration(environment, tmp_path, {})


def test_each_component_has_its_level_and_its_sink(tmp_path: Path) -> None:
    """R15: logging.toml, as RaNNC's documents write it."""
    log = tmp_path / "plan.log"
    (tmp_path / "logging.toml").write_text(
        f'[[sink]]\nname = "file"\ntype = "basic_file_sink_st"\nfilename = "{log}"\n'
        '[[logger]]\nname = "DPStaging"\nsinks = ["file"]\nlevel = "trace"\n'
    )
    logger = logging.getLogger("pyrannc.plan")
    try:
        configure_logging(tmp_path)
        logger.debug("a word of the planner")
        assert "a word of the planner" in log.read_text()
        (tmp_path / "logging.toml").write_text('[[logger]]\nname = "DPStaging"\nlevel = "loud"\n')
        with pytest.raises(ValueError, match="DPStaging is 'loud'"):
            configure_logging(tmp_path)
    finally:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def test_ranks_are_read_from_torchrun_mpirun_and_srun() -> None:
    """R17."""
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    assert find_rank(torchrun) == (1, 4, 1, "h", 5)
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert find_rank(mpi)[:3] == (3, 4, 3)
    assert find_rank({"PMI_RANK": "2", "PMI_SIZE": "3"})[:2] == (2, 3)
    slurm = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0", "SLURM_NTASKS": "3"}
    assert find_rank(slurm)[:3] == (2, 3, 0)
    assert find_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "3"})[:2] == (0, 1)  # a batch script, no srun
    assert find_rank({**slurm, **mpi})[:2] == (3, 4)  # an mpirun that Slurm has started
    assert find_rank({})[:2] == (0, 1)
    for elsewhere in ({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {**slurm, "SLURM_STEP_NUM_NODES": "2"}):
        with pytest.raises(RuntimeError, match="MASTER_ADDR"):
            find_rank(elsewhere)
        assert find_rank({**elsewhere, "MASTER_ADDR": "h"}).address == "h"
