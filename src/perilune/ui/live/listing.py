"""The experiments of a home as the first page lists them."""

import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from threading import Lock
from typing import Any

from perilune.control.queries.lookup import StageStatus, count_experiments, latest_experiments, stage_statuses
from perilune.control.runs.experiments import Control, read_progress
from perilune.metrics.health.verdict import SEVERITY_ORDER
from perilune.ui.attempt import Attempt
from perilune.ui.curves import even_places
from perilune.ui.experiment import view_stage
from perilune.ui.live.followed import StageFollower
from perilune.ui.overview import worst_state
from perilune.ui.report import to_plain
from perilune.ui.view import StageView

SPARKLINE_POINTS = 60
# A sparkline shows the first of these metrics that a stage has.
SPARKLINE_METRICS = ("eval/heldout/pass@1", "pass_rate", "reward", "accuracy", "loss")


class Listing:
    """Reads the experiments: the files of finished stages once, and of running stages only new lines."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._finished: dict[str, dict[str, Any]] = {}
        self._followed: dict[str, StageFollower] = {}
        self._lock = Lock()  # requests come in threads

    def document(self, most: int) -> dict[str, Any]:
        """Return the latest `most` experiments, the newest first, as JSON."""
        with self._lock:
            return self._document(most)

    def _document(self, most: int) -> dict[str, Any]:
        latest = latest_experiments(self._control, most)
        statuses = sorted(
            stage_statuses(self._control, latest), key=lambda status: latest.index(status.experiment_id)
        )
        return {
            "home": str(self._control.home.root),
            "experiments": [
                self._experiment(list(stages))
                for _, stages in groupby(statuses, key=lambda status: status.experiment_id)
            ],
            "older": max(0, count_experiments(self._control) - len(latest)),
        }

    def _experiment(self, statuses: Sequence[StageStatus]) -> dict[str, Any]:
        first = statuses[0]
        views = [view_stage(self._control, status) for status in statuses]
        stages = [self._stage(status, view) for status, view in zip(statuses, views, strict=True)]
        judged = [stage for stage in stages if stage["health"]]
        gravest = min(judged, key=lambda stage: SEVERITY_ORDER.index(stage["health"]["status"]), default=None)
        return {
            "experiment_id": first.experiment_id,
            "name": first.experiment,
            "submitted": first.submitted,
            "overrides": first.overrides,
            "state": worst_state(views),
            "health": gravest and {**gravest["health"], "stage": gravest["stage"]},
            "stages": stages,
        }

    def _stage(self, status: StageStatus, view: StageView) -> dict[str, Any]:
        if view.run_id in self._finished:
            return self._finished[view.run_id]
        follower = self._followed.get(view.run_id)
        if follower is None or follower.view != view:
            follower = self._followed[view.run_id] = StageFollower(view)
        follower.read_new()
        progress = read_progress(view.attempt_dir) if view.attempt_dir and view.state == "active" else None
        document: dict[str, Any] = to_plain(
            {
                "stage": view.name,
                "task": view.task,
                "run": view.run_id,
                "state": view.state,
                "seconds": Attempt(view.attempt_dir).seconds,
                "progress": progress,
                "pass@1": status.summary.get("pass@1"),
                "curve": _sparkline(follower.attempt.metric_lines),
                "health": next(iter(follower.health(time.time())), None),
            }
        )
        if view.state in ("succeeded", "failed", "cancelled"):
            self._finished[view.run_id] = document
            del self._followed[view.run_id]
        return document


def _sparkline(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    for name in SPARKLINE_METRICS:
        points = [(row.get("step"), row.get(name)) for row in rows if row.get(name) is not None]
        if len(points) > 1:
            kept = even_places(len(points), SPARKLINE_POINTS)
            step, value = zip(*(points[place] for place in kept), strict=True)
            return {"name": name, "step": step, "value": value}
    return None
