"""Sweeps: one recipe with several settings and seeds, one experiment for each.

All experiments are submitted at once and wait in the queue of their placement. Stages with the same bundle
are one run. The arms of a sweep are a file; everything else is state of the experiments, so a sweep that was
killed continues with the same command, and a daemon continues what was submitted.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perilune.control.queries.lookup import StageStatus, group_stage_statuses
from perilune.control.record.store import Experiment
from perilune.control.record.transitions import RunState
from perilune.control.runs.current_submission import end_submission
from perilune.control.runs.experiments import Control, advance, plan_stages
from perilune.control.runs.next_stage import StageStarter
from perilune.control.runs.progress import StageStarted
from perilune.control.runs.reconcile import PASS_TIMEOUT_S
from perilune.control.runs.requests import cancel_run, request_experiment_cancel
from perilune.control.runs.templates import Template
from perilune.errors import PeriluneError, RequestError
from perilune.files import canonical_json, locked, read_json, sha256_bytes, write_json
from perilune.frozen import Frozen, invalid_value
from perilune.recipe.axes import Settings
from perilune.recipe.schema import NAME_PATTERN, Recipe


class Arm(Frozen):
    """One choice of settings; `experiments` are ids by seed."""

    settings: Settings
    experiments: dict[int, str]


class Sweep(Frozen):
    """A sweep as recorded.

    Attributes:
        recipe, command: the source of the recipe and the command that the sweep was started with.
        definition: digest of what was requested; the same request is the same sweep.
        metric: the final figure that arms are compared by, "stage.figure"; None is the default.
    """

    name: str
    recipe: str
    command: str
    definition: str
    metric: str | None = None
    created: float
    arms: tuple[Arm, ...] = ()

    def with_arms(self, control: Control, arms: Sequence[Arm]) -> Sweep:
        """Record these arms, and return the sweep with them."""
        changed = self.model_copy(update={"arms": tuple(arms)})
        write_json(control.home.sweeps / f"{self.name}.json", changed.model_dump(mode="json"))
        return changed


def open_sweep(
    control: Control, request: Any, fields: dict[str, Any], *, name: str | None, stem: str
) -> Sweep:
    """Return the recorded sweep of this request, or a new one.

    Args:
        request: what was requested, as JSON.
        fields: further fields of a new sweep.
        name: of the sweep. By default it is `stem` with the first free number.

    Raises:
        RequestError: another request has this name, or the name is invalid.
    """
    definition = sha256_bytes(canonical_json(request))
    control.home.sweeps.mkdir(exist_ok=True)
    with locked(control.home.sweeps / "lock", wait=math.inf):
        known = {sweep.name: sweep for sweep in recorded_sweeps(control)}
        same = [old for old in known.values() if old.definition == definition and name in {None, old.name}]
        if same:
            return same[0]
        if name in known:
            raise RequestError(
                f"the sweep {name} has other arms or seeds",
                where="--name",
                remedy=f"choose another name, or run the command that started it: {known[name].command}",
            )
        numbered = (f"{stem}-{number}" for number in range(1, len(known) + 2))
        chosen = name or next(candidate for candidate in numbered if candidate not in known)
        check_sweep_name(chosen)
        fresh = Sweep(name=chosen, definition=definition, created=time.time(), **fields)
        return fresh.with_arms(control, ())


def check_sweep_name(name: str) -> None:
    """Raise RequestError if `name` cannot be the name of a sweep."""
    if not re.fullmatch(NAME_PATTERN, name):
        remedy = "start with a letter; then letters, digits, - and _"
        raise RequestError(f"'{name}' cannot be the name of a sweep", where="--name", remedy=remedy)


def recorded_sweeps(control: Control) -> list[Sweep]:
    """Return all sweeps of the home, oldest first.

    Raises:
        RequestError: a file is damaged.
    """
    sweeps = map(_read_sweep, control.home.sweeps.glob("*.json"))
    return sorted(sweeps, key=lambda sweep: sweep.created)


def find_sweep(control: Control, name: str) -> Sweep | None:
    """Return the sweep called `name`, or None.

    Raises:
        RequestError: its file is damaged.
    """
    path = control.home.sweeps / f"{name}.json"
    return _read_sweep(path) if re.fullmatch(NAME_PATTERN, name) and path.exists() else None


def _read_sweep(path: Path) -> Sweep:
    try:
        return Sweep.model_validate(read_json(path))
    except ValidationError as error:
        what = f"not a sweep: {invalid_value(error).what}"
        raise RequestError(what, where=str(path), remedy="remove the file; the experiments stay") from None


@dataclass(frozen=True, slots=True)
class ArmState:
    """The state of one experiment of a sweep: its stages, and why none of them can start, if so."""

    stages: tuple[StageStatus, ...]
    error: PeriluneError | None = None

    @property
    def is_over(self) -> bool:
        return self.error is not None or not self.stages[0].requested

    @property
    def succeeded(self) -> bool:
        return self.error is None and all(stage.state == RunState.SUCCEEDED for stage in self.stages)

    @property
    def stage(self) -> StageStatus:
        """The current stage: the first that has not succeeded, else the last."""
        return next((stage for stage in self.stages if stage.state != RunState.SUCCEEDED), self.stages[-1])

    @property
    def problem(self) -> str:
        """The reason why it failed, on one line; "" if it did not."""
        if self.error is not None:
            return str(self.error).partition("\n")[0]
        if self.succeeded:
            return ""
        why = (self.stage.message or self.stage.cause).partition("\n")[0]
        return f"{self.stage.name} {self.stage.state}: {why}"


class SweepRunner:
    """Runs the experiments of a sweep side by side. An experiment that fails does not stop the others.

    Args:
        template: where runs go. Earlier experiments have a higher priority, so that they finish first.
    """

    def __init__(self, control: Control, template: Template) -> None:
        self.control, self.template = control, template
        self.live: list[str] = []  # ids of the experiments that have not ended
        self._starter = StageStarter(control)
        self._errors: dict[str, PeriluneError] = {}
        self._submitted = 0

    def submit(self, experiment_id: str, recipe: Recipe) -> None:
        """Submit an experiment: finished stages are reused, the next one is queued."""
        template = self.template.model_copy(update={"priority": self.template.priority - self._submitted})
        self._submitted += 1
        self.live.append(experiment_id)
        try:
            for event in advance(
                self.control, experiment_id, plan_stages(recipe, template), template=template
            ):
                if isinstance(event, StageStarted):
                    break
        except PeriluneError as error:
            self._give_up(experiment_id, error)
        self._starter.announce(self.live)

    def reconcile(self) -> dict[str, ArmState]:
        """Reconcile all runs, start next stages, and return the states of the experiments live before."""
        # All, because a run of another experiment may be ahead in the queue.
        self.control.reconciler.reconcile_all(patience=PASS_TIMEOUT_S)
        for experiment, outcome in self._starter.start_next_stages(self.live):
            if isinstance(outcome, PeriluneError):
                self._give_up(experiment.id, outcome)
        stages = group_stage_statuses(self.control, self.live)
        states = {key: ArmState(tuple(statuses), self._errors.get(key)) for key, statuses in stages.items()}
        self.live = [key for key in self.live if not states[key].is_over]
        return states

    def request_cancel(self) -> list[str]:
        """Request that everything live stops; returns the ids of the runs to stop.

        Runs that experiments outside the sweep need continue.
        """
        stopping: list[str] = []
        for experiment in self.live:
            with contextlib.suppress(RequestError):  # it has just ended
                stopping += request_experiment_cancel(self.control, experiment)
        return stopping

    def cancel(self, stopping: Sequence[str]) -> None:
        """Stop the runs that `request_cancel` returned, and wait for their ends."""
        for run_id in stopping:
            with contextlib.suppress(PeriluneError):
                cancel_run(self.control, run_id)

    def _give_up(self, experiment_id: str, error: PeriluneError) -> None:
        """Give up an experiment whose next stage cannot start; the same command tries it again."""
        self._errors[experiment_id] = error
        with self.control.store.transaction() as session:
            end_submission(session, session.get_one(Experiment, experiment_id), "cancelled")
