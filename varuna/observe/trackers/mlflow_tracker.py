"""A run of MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME work as usual.

Without a URI, MLflow uses a database, which needs packages that the extra `mlflow` does not install. Without
these packages the run goes to the folder `mlruns`.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient, is_tracking_uri_set

from varuna.files import write_atomic
from varuna.observe.trackers.tracker import MetricRow, TrackedJob

RUN_FILE = "mlflow_run"
"""File in the log folder with the id of the run."""
FILES = "mlruns"
ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"
"""Variable without which newer versions refuse a folder as a store."""
MAX_METRICS = 1000
"""Values in one request: the limit of MLflow's server."""


class MlflowTracker:
    def __init__(self, job: TrackedJob) -> None:
        """Open the run, or continue it if an earlier manager of the job has begun it."""
        os.environ.setdefault(ALLOW_FILES, "true")
        self._client = MlflowClient(default_uri())
        path = job.folder / RUN_FILE
        if path.is_file():
            self._run = path.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "varuna")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=job.name).info.run_id
        for key, value in job.settings.items():
            self._client.log_param(self._run, key, str(value)[:500])
        write_atomic(path, self._run, private=True)

    def write(self, rows: Sequence[MetricRow]) -> None:
        metrics = [
            Metric(name.replace(":", "_"), value, int(row.at * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def default_uri() -> str | None:
    """Return the store to use; None: MLflow chooses it."""
    if is_tracking_uri_set() or importlib.util.find_spec("sqlalchemy") is not None:
        return None
    return Path(FILES).absolute().as_uri()


def open_tracker(job: TrackedJob) -> MlflowTracker:
    return MlflowTracker(job)
