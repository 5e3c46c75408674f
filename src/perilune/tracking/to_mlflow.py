"""MLflow: the server in MLFLOW_TRACKING_URI, or files."""

import os
import re
from pathlib import Path

os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions refuse files without this

from mlflow.entities import Metric, Param, Run
from mlflow.tracking import MlflowClient

from perilune.tracking.sinks import TrackedRun
from perilune.tracking.trail import Figures

RUN_TAG = "perilune.run"
MAX_PARAMETER_CHARACTERS = 500  # MLflow refuses more than a few thousand
_FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in a metric's name


class Tracker:
    """One run in one experiment. An earlier copy of the run is deleted, and can be restored in MLflow."""

    after = -1

    def __init__(self, directory: Path, run: TrackedRun) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or directory.absolute().as_uri()
        self.place = f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {uri}"
        self._client = MlflowClient(tracking_uri=uri)
        self._started = run.started
        self._run = self._start_run(run)

    def _start_run(self, run: TrackedRun) -> Run:
        existing = self._client.get_experiment_by_name(run.experiment)
        experiment = existing.experiment_id if existing else self._client.create_experiment(run.experiment)
        for before in self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'"):
            self._client.delete_run(before.info.run_id)
        created = self._client.create_run(
            experiment, start_time=int(run.started * 1000), tags={RUN_TAG: run.id}, run_name=run.stage
        )
        params = [Param(name, str(value)[:MAX_PARAMETER_CHARACTERS]) for name, value in run.config.items()]
        self._client.log_batch(created.info.run_id, params=params)
        return created

    def write(self, figures: Figures) -> None:
        """Record one step. MLflow refuses "@" in names, so it becomes "_at_"."""
        moment = int((self._started + figures.seconds) * 1000)
        metrics = [
            Metric(_FORBIDDEN.sub("_", name.replace("@", "_at_")), value, moment, figures.step)
            for name, value in figures.values.items()
        ]
        self._client.log_batch(self._run.info.run_id, metrics=metrics)

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run.info.run_id, "FAILED" if failed else "FINISHED")
