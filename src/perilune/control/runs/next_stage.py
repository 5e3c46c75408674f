"""The next stage of what is wanted, begun by whoever looks after a home: the daemon, or `reconcile`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select

from perilune.control.queries.lookup import stage_at
from perilune.control.record.identity import require_own_run
from perilune.control.record.store import Experiment, Run, Stage, record
from perilune.control.record.transitions import RunState
from perilune.control.runs.current_submission import (
    BLOCKED,
    ExperimentCancelledError,
    experiments_to_advance,
    latest_run,
    runs_under_way,
)
from perilune.control.runs.experiments import Control, advance, stage_plans
from perilune.control.runs.progress import StageStarted
from perilune.control.runs.templates import Template
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.files import read_json
from perilune.recipe.schema import Recipe

LONGEST_PAUSE = 300.0  # seconds between two tries to begin a stage that cannot be begun


def recorded_recipe(control: Control, experiment_id: str) -> Recipe:
    """The recipe of an experiment, as it was read when the experiment was made.

    Raises:
        RequestError: it is missing or malformed.
        pydantic.ValidationError: this version of Perilune, or a plugin, does not understand it any more.
    """
    return Recipe.model_validate(read_json(control.home.experiment(experiment_id) / "recipe.json"))


def template_of(experiment: Experiment) -> Template | None:
    """Where the experiment was last asked for; None is this machine."""
    return None if experiment.template is None else Template.model_validate(experiment.template)


@dataclass
class _Trouble:
    """Why the next stage of an experiment could not be begun."""

    said: str
    tries: int
    again: float  # on the monotonic clock


class StageStarter:
    """Begins later stages. Several may do so at once: a stage that has its run is not submitted again."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self._troubled: dict[str, _Trouble] = {}

    def start_next_stages(
        self, only: str | None = None
    ) -> Iterator[tuple[Experiment, StageStarted | PeriluneError]]:
        """Begin the next stage of every experiment that is wanted and of which nothing is under way.

        Args:
            only: of that experiment and no other.

        Yields:
            What came of it: the stage that begins, or why none can. That is tried again later, with growing
            pauses, and told again when it has become another reason.
        """
        for experiment in experiments_to_advance(self.control.store):
            trouble = self._troubled.get(experiment.id)
            if only not in {None, experiment.id}:
                continue
            if trouble is not None and time.monotonic() < trouble.again:
                continue
            try:
                if begun := self._begin_next(experiment):
                    yield experiment, begun
            except Exception as error:  # whatever it is, it is this experiment's and holds up no other
                unexpected = f"{type(error).__name__}: {error}"
                told = error if isinstance(error, PeriluneError) else WorkFailedError(unexpected)
                if self._note(experiment, told):
                    yield experiment, told
            else:
                self._troubled.pop(experiment.id, None)

    def run(self, run_id: str) -> tuple[Run, RunState | None]:
        """Take a run as far as it goes now: how it stands, and its outcome once it has ended."""
        require_own_run(self.control.home, run_id)
        run = self.control.reconciler.one(run_id)
        state = RunState(run.state)
        return run, state if state.terminal else None

    def experiment(self, experiment_id: str) -> tuple[Run, RunState | None]:
        """Take what is under way of an experiment as far as it goes now.

        Returns:
            The run of the stage that it is at, and its own outcome once it has ended. It is cancelled,
            though that run has succeeded, when the stage after it is not to begin.

        Raises:
            RequestError: when no stage of it has ever been begun.
        """
        with self.control.store.snapshot() as session:
            runs = [run.id for run in runs_under_way(session, experiment_id)]
        for run_id in runs:
            require_own_run(self.control.home, run_id)
            self.control.reconciler.one(run_id)
        with self.control.store.snapshot() as session:
            experiment = session.get_one(Experiment, experiment_id)
            at = stage_at(session, experiment_id)
            waiting = select(Stage).where(Stage.experiment_id == experiment_id, Stage.run_id.is_(None))
            more = session.scalars(waiting.limit(1)).first() is not None
            over = not experiment.requested and not runs_under_way(session, experiment_id)
        if at is None:
            raise RequestError("no stage of it has been begun", where=f"experiment {experiment.name}")
        if not over:
            return at, None
        stopped = at.state == RunState.SUCCEEDED and more
        return at, RunState.CANCELLED if stopped else RunState(at.state)

    def _begin_next(self, experiment: Experiment) -> StageStarted | None:
        template = template_of(experiment)
        plans = stage_plans(recorded_recipe(self.control, experiment.id), template)
        with suppress(ExperimentCancelledError):
            for event in advance(self.control, experiment.id, plans, template=template, asked=False):
                if isinstance(event, StageStarted):
                    return event
        return None

    def _note(self, experiment: Experiment, error: PeriluneError) -> bool:
        """Remember that it could not go on, and say so in the record; False when it has been said."""
        before = self._troubled.get(experiment.id)
        tries = 1 if before is None else before.tries + 1
        again = time.monotonic() + min(LONGEST_PAUSE, 2.0**tries)
        self._troubled[experiment.id] = _Trouble(str(error), tries, again)
        if before is not None and before.said == str(error):
            return False
        with self.control.store.transaction() as session:
            after = latest_run(session, experiment)
            record(session, BLOCKED, run_id=after, experiment=experiment.id, message=str(error))
        return True
