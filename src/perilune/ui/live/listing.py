"""The experiments of a home as the first page lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from perilune.control.queries.lookup import StageStatus, experiment_count, latest_experiments, stage_statuses
from perilune.control.runs.experiments import Control, read_progress
from perilune.ui.attempt import Attempt
from perilune.ui.curves import thin
from perilune.ui.experiment import stage_view
from perilune.ui.health import healths_of
from perilune.ui.overview import state_of
from perilune.ui.report import plain
from perilune.ui.view import StageView

SPARK = 60  # points of a sparkline
CURVES = ("eval/heldout/pass@1", "pass_rate", "reward", "accuracy", "loss")  # the first that a stage has
GRAVITY = ("broken", "watch", "healthy")


class Listing:
    """Reads the list. What a finished stage wrote is read once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._finished: dict[str, dict[str, Any]] = {}

    def document(self, most: int) -> dict[str, Any]:
        """The latest `most` experiments, the newest first, as JSON."""
        latest = latest_experiments(self._control, most)
        statuses = sorted(
            stage_statuses(self._control, latest), key=lambda one: latest.index(one.experiment_id)
        )
        return {
            "home": str(self._control.home.root),
            "experiments": [
                self._experiment(list(stages))
                for _, stages in groupby(statuses, key=lambda one: one.experiment_id)
            ],
            "older": max(0, experiment_count(self._control) - len(latest)),
        }

    def _experiment(self, statuses: Sequence[StageStatus]) -> dict[str, Any]:
        first = statuses[0]
        views = [stage_view(self._control, one) for one in statuses]
        stages = [self._stage(status, view) for status, view in zip(statuses, views, strict=True)]
        told = [one for one in stages if one["health"]]
        gravest = min(told, key=lambda one: GRAVITY.index(one["health"]["status"]), default=None)
        return {
            "id": first.experiment_id,
            "name": first.experiment,
            "submitted": first.submitted,
            "overrides": first.overrides,
            "state": state_of(views),
            "health": gravest and {**gravest["health"], "stage": gravest["stage"]},
            "stages": stages,
        }

    def _stage(self, status: StageStatus, view: StageView) -> dict[str, Any]:
        if view.run_id in self._finished:
            return self._finished[view.run_id]
        attempt = Attempt(view.attempt_dir)
        progress = read_progress(view.attempt_dir) if view.attempt_dir and view.state == "active" else None
        found: dict[str, Any] = plain(
            {
                "stage": view.name,
                "task": view.task,
                "run": view.run_id,
                "state": view.state,
                "seconds": attempt.seconds,
                "progress": progress,
                "pass@1": status.summary.get("pass@1"),
                "curve": _curve(attempt),
                "health": next(iter(healths_of([(view, attempt)])), None),
            }
        )
        if view.state in ("succeeded", "failed", "cancelled"):
            self._finished[view.run_id] = found
        return found


def _curve(attempt: Attempt) -> Mapping[str, Any] | None:
    """The sparkline of a stage: its main figure by step."""
    columns = attempt.metrics
    for name in CURVES:
        known = [place for place, value in enumerate(columns.get(name, ())) if value is not None]
        if len(known) > 1:
            rows = {key: [columns[key][place] for place in known] for key in ("step", name)}
            thinned = thin(rows, SPARK)
            return {"name": name, "step": thinned["step"], "value": thinned[name]}
    return None
