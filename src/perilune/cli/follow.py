"""Following an experiment on a terminal: events become bars, Ctrl-C becomes a clean stop."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from perilune.cli.console import StageProgress, duration, stage_progress
from perilune.cli.sending import sending_shown
from perilune.cli.track import LAST_SECONDS, Trackers
from perilune.control.runs import progress as events
from perilune.control.runs.experiments import advance, stage_plans
from perilune.control.runs.requests import cancel, request_experiment_cancel
from perilune.control.runs.stage_failures import explain_failure
from perilune.errors import PeriluneError, RequestError

if TYPE_CHECKING:
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.templates import Template
    from perilune.recipe.schema import Recipe


def follow(
    control: Control,
    experiment: str,
    recipe: Recipe,
    template: Template | None = None,
    *,
    asked: bool = True,
) -> PeriluneError | None:
    """Carry an experiment to its end where `template` says, showing it; returns why it failed, or None.

    With `asked=False`, as it was asked for before, and only as long as it is wanted.

    Raises:
        KeyboardInterrupt: after Ctrl-C; by then a stage that this process began has been told to stop.
    """
    running: events.StageStarted | None = None
    failure: PeriluneError | None = None
    trackers = Trackers(control, recipe.tracking)
    with stage_progress() as view, sending_shown(control.home, view) as begun:
        try:
            plans = stage_plans(recipe, template)
            for event in advance(control, experiment, plans, template=template, asked=asked):
                if isinstance(event, events.StageStarted):
                    running = event
                    begun(event.stage, event.run_id)
                    trackers.begin(event.stage, event.run_id)
                elif isinstance(event, events.StageReused):
                    trackers.begin(event.stage, event.run_id, ended=True)
                elif isinstance(event, events.StageFailed):
                    failure = explain_failure(event)
                show(event, view)
                _warn(view, trackers)
            _warn(view, trackers, LAST_SECONDS)
        except KeyboardInterrupt:
            if running is not None:
                _interrupt(control, experiment, running, view)
            raise
    return failure


def _warn(view: StageProgress, trackers: Trackers, seconds: float = 0.0) -> None:
    for warning in trackers.warnings(seconds):
        view.say(warning)


def show(event: events.StageEvent, view: StageProgress) -> None:
    """Show one event."""
    match event:
        case events.StageStarted():
            verb = "joined" if event.attached else "run"
            view.started(event.stage, f"stage {event.position} of {event.stages}, {verb} {event.run_id}")
        case events.StageProgress():
            view.progressed(event.stage, event.done, event.total, event.unit, event.figures)
        case events.StageResumed():
            why = event.message or event.cause
            view.say(f"[{event.stage}] attempt {event.attempt} takes over from its last checkpoint: {why}")
        case events.StageReused():
            view.ended(event.stage, "reused", f"finished before, run {event.run_id}")
        case events.StageFinished():
            view.ended(event.stage, "done", duration(event.seconds))
        case events.StageFailed():
            view.ended(event.stage, "failed", event.cause)


def _interrupt(control: Control, experiment: str, running: events.StageStarted, view: StageProgress) -> None:
    """Stop what this command began; leave what it joined."""
    stage, run_id = running.stage, running.run_id
    if running.attached:
        view.say(f"left {stage} running: perilune cancel {run_id} stops it")
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the wish is recorded
    try:
        if run_id not in request_experiment_cancel(control, experiment):
            return  # it had just ended, or another experiment wants it too
    except RequestError:
        return  # all had just ended
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        view.say(f"stopping {stage}; Ctrl-C again leaves at once")
        cancel(control, run_id)
        view.ended(stage, "failed", "stopped")
        view.say("stopped: the same command goes on from the last checkpoint")
    except KeyboardInterrupt:
        view.say(f"left while {stage} is being stopped: perilune reconcile sees to it")
        raise
