"""Start the next stages of requested experiments, from the daemon or `perilune reconcile`."""

import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from sqlalchemy import select

from perilune.control.queries.lookup import find_current_stage_run
from perilune.control.record.home import announce_starter
from perilune.control.record.identity import require_own_run
from perilune.control.record.store import Experiment, Run, Stage, record_event
from perilune.control.record.transitions import RunState
from perilune.control.runs.current_submission import (
    BLOCKED_EVENT,
    ExperimentCancelledError,
    experiments_to_advance,
    latest_run,
    live_runs,
)
from perilune.control.runs.experiments import Control, advance, plan_stages
from perilune.control.runs.progress import StageStarted
from perilune.control.runs.templates import Template
from perilune.errors import PeriluneError, RequestError, WorkFailedError
from perilune.files import read_json
from perilune.recipe.schema import Recipe

MAX_RETRY_PAUSE_S = 300.0  # seconds between two tries to start a stage
MAX_ANNOUNCED = 256  # experiments; each takes an open file


def read_recipe(control: Control, experiment_id: str) -> Recipe:
    """Return the recipe of an experiment, as it was resolved when the experiment was created.

    Raises:
        RequestError: the file is missing or malformed.
        pydantic.ValidationError: this version of Perilune, or of a plugin, no longer supports it.
    """
    return Recipe.model_validate(read_json(control.home.experiment(experiment_id) / "recipe.json"))


def submission_template(experiment: Experiment) -> Template | None:
    """Return the template of the experiment's last submission; None is this machine."""
    return None if experiment.template is None else Template.model_validate(experiment.template)


@dataclass
class _BlockedStage:
    message: str
    tries: int
    retry_at: float  # on the monotonic clock


class StageStarter:
    """Starts later stages. Several processes may do so at once: a stage with a run is not submitted again."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self._blocked: dict[str, _BlockedStage] = {}
        self._announced: dict[str, ExitStack] = {}

    def start_next_stages(
        self, only: Collection[str] | None = None
    ) -> Iterator[tuple[Experiment, StageStarted | PeriluneError]]:
        """Start the next stage of every requested experiment that has no live run.

        Args:
            only: ids of the only experiments to consider.

        Yields:
            The stage that started, or why none could. A blocked stage is tried again with growing pauses, and
            yielded again when the reason changes.
        """
        self.announce(only)
        for experiment in experiments_to_advance(self.control.store):
            if only is not None and experiment.id not in only:
                continue
            blocked = self._blocked.get(experiment.id)
            if blocked is not None and time.monotonic() < blocked.retry_at:
                continue
            try:
                if event := self._start_next(experiment):
                    yield experiment, event
            except Exception as error:  # of one experiment; the others continue
                unexpected = f"{type(error).__name__}: {error}"
                reason = error if isinstance(error, PeriluneError) else WorkFailedError(unexpected)
                if self._note_blocked(experiment, reason):
                    yield experiment, reason
            else:
                self._blocked.pop(experiment.id, None)

    def announce(self, only: Collection[str] | None) -> None:
        """Announce that this process starts the next stages of these experiments, and of no others.

        Of many, the oldest are announced, which finish first.
        """
        requested = set(self.control.store.read(select(Experiment.id).where(Experiment.requested)))
        selected = set(sorted(requested if only is None else requested.intersection(only))[:MAX_ANNOUNCED])
        for experiment_id in self._announced.keys() - selected:
            self._announced.pop(experiment_id).close()
        for experiment_id in selected - self._announced.keys():
            with ExitStack() as stack:
                stack.enter_context(announce_starter(self.control.home, experiment_id))
                self._announced[experiment_id] = stack.pop_all()

    def advance_run(self, run_id: str) -> tuple[Run, RunState | None]:
        """Reconcile a run; returns it, and its outcome if it has ended."""
        require_own_run(self.control.home, run_id)
        run = self.control.reconciler.reconcile(run_id)
        state = RunState(run.state)
        return run, state if state.is_terminal else None

    def advance_experiment(self, experiment_id: str) -> tuple[Run, RunState | None]:
        """Reconcile the live runs of an experiment.

        Returns:
            The run of the current stage, and the outcome of the experiment if it has ended. An experiment is
            cancelled although that run succeeded if the stage after it will not start.

        Raises:
            RequestError: no stage of the experiment has ever started.
        """
        with self.control.store.snapshot() as session:
            runs = [run.id for run in live_runs(session, experiment_id)]
        for run_id in runs:
            require_own_run(self.control.home, run_id)
            self.control.reconciler.reconcile(run_id)
        with self.control.store.snapshot() as session:
            experiment = session.get_one(Experiment, experiment_id)
            run = find_current_stage_run(session, experiment_id)
            waiting = select(Stage).where(Stage.experiment_id == experiment_id, Stage.run_id.is_(None))
            more = session.scalars(waiting.limit(1)).first() is not None
            has_ended = not experiment.requested and not live_runs(session, experiment_id)
        if run is None:
            where, remedy = f"experiment {experiment.name}", "run its recipe again"
            raise RequestError("no stage has started yet", where=where, remedy=remedy)
        if not has_ended:
            return run, None
        stopped = run.state == RunState.SUCCEEDED and more
        return run, RunState.CANCELLED if stopped else RunState(run.state)

    def _start_next(self, experiment: Experiment) -> StageStarted | None:
        template = submission_template(experiment)
        plans = plan_stages(read_recipe(self.control, experiment.id), template)
        with suppress(ExperimentCancelledError):
            for event in advance(self.control, experiment.id, plans, template=template, new_submission=False):
                if isinstance(event, StageStarted):
                    return event
        return None

    def _note_blocked(self, experiment: Experiment, error: PeriluneError) -> bool:
        """Remember and record why the next stage is blocked; False if the reason is recorded already."""
        before = self._blocked.get(experiment.id)
        tries = 1 if before is None else before.tries + 1
        retry_at = time.monotonic() + min(MAX_RETRY_PAUSE_S, 2.0**tries)
        self._blocked[experiment.id] = _BlockedStage(str(error), tries, retry_at)
        if before is not None and before.message == str(error):
            return False
        with self.control.store.transaction() as session:
            after = latest_run(session, experiment)
            record_event(session, BLOCKED_EVENT, run_id=after, experiment=experiment.id, message=str(error))
        return True
