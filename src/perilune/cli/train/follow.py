"""Following an experiment on a terminal: events become progress bars, Ctrl-C stops the running stage."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from perilune.cli.console import LiveBars, PlainLines, make_stage_progress
from perilune.cli.train.trackers import LAST_SECONDS, Trackers
from perilune.control.runs import progress as events
from perilune.control.runs.experiments import Control, advance, plan_stages
from perilune.control.runs.progress import explain_failure
from perilune.control.runs.requests import cancel_run, request_experiment_cancel
from perilune.control.runs.templates import Template
from perilune.errors import PeriluneError, RequestError
from perilune.metrics.training import describe_training
from perilune.recipe.schema import Recipe
from perilune.units import format_duration


def follow(
    control: Control, experiment: str, recipe: Recipe, template: Template | None = None, *, asked: bool = True
) -> PeriluneError | None:
    """Run an experiment to its end where `template` says and show its progress; returns the failure, or None.

    With `asked=False` continue what was requested before, and stop when that is cancelled.

    Raises:
        KeyboardInterrupt: after Ctrl-C. A stage that this process started has been cancelled by then.
    """
    running: events.StageStarted | None = None
    failure: PeriluneError | None = None
    trackers = Trackers(control, recipe.tracking)
    with make_stage_progress() as view:
        try:
            plans = plan_stages(recipe, template)
            for event in advance(control, experiment, plans, template=template, new_submission=asked):
                if isinstance(event, events.StageStarted):
                    running = event
                    trackers.begin(event.stage, event.run_id)
                elif isinstance(event, events.StageReused):
                    trackers.begin(event.stage, event.run_id, ended=True)
                elif isinstance(event, events.StageFailed):
                    failure = explain_failure(event)
                show_event(event, view)
                for warning in trackers.warnings():
                    view.print(warning)
            for warning in trackers.warnings(LAST_SECONDS):
                view.print(warning)
        except KeyboardInterrupt:
            if running is not None:
                _interrupt(control, experiment, running, view)
            raise
    return failure


def show_events(stream: Iterable[events.StageEvent]) -> events.StageEvent | None:
    """Show events on stderr as they arrive; returns the last one."""
    last: events.StageEvent | None = None
    with make_stage_progress() as view:
        for last in stream:
            show_event(last, view)
    return last


def show_event(event: events.StageEvent, view: PlainLines | LiveBars) -> None:
    match event:
        case events.StageStarted():
            verb = "joined" if event.attached else "run"
            view.start(event.stage, f"stage {event.position} of {event.stages}, {verb} {event.run_id}")
        case events.StageProgress():
            view.update(event.stage, event.done, event.total, event.unit, event.figures)
        case events.StageResumed():
            why = event.message or event.cause
            view.print(f"[{event.stage}] attempt {event.attempt} follows attempt {event.attempt - 1}: {why}")
        case events.StageNotice():
            view.print(f"[{event.stage}] attempt {event.attempt}: {event.message}")
        case events.StageReused():
            view.end(event.stage, "reused", f"finished before, run {event.run_id}")
        case events.StageFinished():
            figures = describe_training(event.summary)
            note = format_duration(event.seconds) + (f"; {figures}" if figures else "")
            view.end(event.stage, "done", note)
        case events.StageFailed():
            if event.cancelled:
                view.end(event.stage, "cancelled", "")
            else:
                view.end(event.stage, "failed", event.cause)


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _interrupt(
    control: Control, experiment: str, running: events.StageStarted, view: PlainLines | LiveBars
) -> None:
    stage, run_id = running.stage, running.run_id
    if running.attached:
        view.print(f"{stage} continues; to stop it: perilune cancel {run_id}")
        return
    try:
        with interrupts_ignored():  # until the request is recorded
            if not request_experiment_cancel(control, experiment, only=run_id):
                return  # the run has just ended, or another experiment needs it too
    except RequestError:
        return  # every stage has just ended
    try:
        view.print(f"stopping {stage}; press Ctrl-C again to exit now")
        with suppress(RequestError):  # it has just ended
            cancel_run(control, run_id)
        view.end(stage, "cancelled", "")
        view.print("stopped; the same command resumes from the last checkpoint")
    except KeyboardInterrupt:
        view.print(f"{stage} is still stopping; `perilune reconcile` completes it")
        raise
