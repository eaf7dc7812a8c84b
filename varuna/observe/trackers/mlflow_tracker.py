"""A run of MLflow. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME work as usual.

Without a URI, MLflow uses a database, which needs packages that the extra `mlflow` does not install. Without
these packages the run goes to the folder `mlruns`.
"""

import importlib.util
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlflow.entities import Metric
from mlflow.tracking import MlflowClient, is_tracking_uri_set

from varuna.files import write_atomic
from varuna.observe.trackers.rows import OWN_NAMES, MetricRow
from varuna.observe.trackers.tracker import TrackedJob

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
            self._run = path.read_text("utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
            self._names = MlflowNames(self._client.get_run(self._run).data.metrics)
            return
        self._names = MlflowNames(())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "varuna")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=job.name).info.run_id
        for key, value in job.settings.items():
            self._client.log_param(self._run, key, str(value)[:500])
        write_atomic(path, self._run, private=True)

    def write(self, rows: Sequence[MetricRow]) -> None:
        metrics = [
            Metric(self._names.of(name), value, int(row.at * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MAX_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class MlflowNames:
    """Names of the metrics of a run. MLflow may keep each in a file, so `a` and `a/b` exclude each other."""

    def __init__(self, taken: Iterable[str]) -> None:
        """`taken`: the names that the run has already."""
        self._taken = {*OWN_NAMES, *taken}
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the name of a scalar in MLflow."""
        if name not in self._known:
            found = accepted_name(name)
            while found not in self._taken and (other := self._clashing(found)):
                place = min(len(found), len(other))
                found = f"{found[:place]}_{found[place:]}"
            self._taken.add(found)
            self._known[name] = found
        return self._known[name]

    def _clashing(self, name: str) -> str | None:
        """Return a name that would be a folder where the other one is a file."""
        for other in self._taken:
            short, long = sorted((name, other), key=len)
            if long.startswith(f"{short}/"):
                return other
        return None


def accepted_name(name: str) -> str:
    """Replace by `_` what MLflow refuses: characters, empty parts, and dots at the start of a part."""
    parts = re.sub(r"[^\w.\-/ ]", "_", name).split("/")
    return "/".join(re.sub(r"^\.+", "_", part) or "_" for part in parts)


def default_uri() -> str | None:
    """Return the store to use; None: MLflow chooses it."""
    if is_tracking_uri_set() or importlib.util.find_spec("sqlalchemy") is not None:
        return None
    return Path(FILES).absolute().as_uri()


def open_tracker(job: TrackedJob) -> MlflowTracker:
    return MlflowTracker(job)
