"""The next stage of what is wanted, begun by whoever looks after a home: the daemon, or `reconcile`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from perilune.control.experiments import Control, StagePlan, advance, stage_plans
from perilune.control.progress import StageEvent, StageStarted
from perilune.control.store import Experiment, record
from perilune.control.templates import Template
from perilune.control.wanted import NotWantedError, wanted_and_idle
from perilune.errors import PeriluneError
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


def wish_of(control: Control, experiment: Experiment) -> tuple[list[StagePlan], Template | None]:
    """What an experiment's stages are to run, and where: as it was last asked for."""
    asked = experiment.template
    template = None if asked is None else Template.model_validate(asked)
    return stage_plans(recorded_recipe(control, experiment.id), template), template


@dataclass
class _Trouble:
    """Why the next stage of an experiment could not be begun."""

    said: str
    tries: int
    again: float  # on the monotonic clock


class Succession:
    """Begins later stages. Several may do so at once: a stage that has its run is not submitted again."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self._troubled: dict[str, _Trouble] = {}

    def carry_on(self) -> Iterator[tuple[Experiment, StageEvent | PeriluneError]]:
        """Begin the next stage of every experiment that is wanted and of which nothing is under way.

        Yields:
            What came of it: a stage that began or was there already, or why none could begin. That is tried
            again later, with growing pauses, and told again when it has become another reason.
        """
        for experiment in wanted_and_idle(self.control.store):
            trouble = self._troubled.get(experiment.id)
            if trouble is not None and time.monotonic() < trouble.again:
                continue
            try:
                yield from ((experiment, event) for event in self._begin_next(experiment))
            except (PeriluneError, ValueError) as error:
                told = error if isinstance(error, PeriluneError) else PeriluneError(str(error))
                if self._note(experiment, told):
                    yield experiment, told
            else:
                self._troubled.pop(experiment.id, None)

    def _begin_next(self, experiment: Experiment) -> Iterator[StageEvent]:
        plans, template = wish_of(self.control, experiment)
        with suppress(NotWantedError):
            for event in advance(self.control, experiment.id, plans, template=template, asked=False):
                yield event
                if isinstance(event, StageStarted):
                    return

    def _note(self, experiment: Experiment, error: PeriluneError) -> bool:
        """Remember that it could not go on, and say so in the record; False when it has been said."""
        before = self._troubled.get(experiment.id)
        tries = 1 if before is None else before.tries + 1
        again = time.monotonic() + min(LONGEST_PAUSE, 2.0**tries)
        self._troubled[experiment.id] = _Trouble(str(error), tries, again)
        if before is not None and before.said == str(error):
            return False
        with self.control.store.transaction() as session:
            record(session, "experiment.waits", experiment=experiment.id, message=str(error))
        return True
