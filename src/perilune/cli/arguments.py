"""What commands share: how groups are made, how a run is named, how its state is opened and told."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.output import echo

if TYPE_CHECKING:
    from perilune.control.record.store import Run
    from perilune.control.runs.experiments import Control
    from perilune.control.runs.progress import StageEvent

COMPLETED = 5  # experiments whose runs are offered
RUN_HELP = "Id of the run, a unique beginning of it, EXPERIMENT/STAGE, or a stage of the latest experiment."


def run_names(incomplete: str) -> list[tuple[str, str]]:
    """For the shell's completion: stages of the latest experiment by name, others as EXPERIMENT/STAGE."""
    from perilune.control.queries.lookup import latest_experiments, stage_statuses

    control = open_control(look=False)
    latest = latest_experiments(control, COMPLETED)
    found = [one for one in stage_statuses(control, latest) if one.run_id]
    short = [(one.name, one.state) for one in found if one.experiment_id == latest[0]]
    names = [*short, *((f"{one.experiment}/{one.name}", one.state) for one in found)]
    ids = [(one.run_id, f"{one.experiment}/{one.name}, {one.state}") for one in found]
    return [(name, told) for name, told in [*names, *ids] if name.startswith(incomplete)]


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=run_names, show_default=False)
]
RunOrExperiment = Annotated[
    str,
    typer.Argument(
        metavar="RUN|EXPERIMENT",
        help=f"{RUN_HELP} Or an experiment: its name (the latest of it), or the beginning of its id.",
        autocompletion=run_names,
        show_default=False,
    ),
]
CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A Hugging Face folder, or a run that made a checkpoint: its id, or EXPERIMENT/STAGE.",
        autocompletion=run_names,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def command_group(help: str) -> typer.Typer:
    """A command that has commands of its own, which its module adds."""
    return typer.Typer(
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def open_control(*, look: bool = True) -> Control:
    """The control plane of this home, after a look at what has happened meanwhile.

    What does not answer soon is told as it was seen last; stderr says which runs those are.
    """
    from perilune.control.runs.experiments import Control

    control = Control()
    if look:
        look_around(control)
    return control


def look_around(control: Control) -> None:
    """Take a look at all that lives, no longer than people wait for a list."""
    from perilune.control.queries.quick_refresh import quick_refresh
    from perilune.errors import PeriluneError

    try:
        unseen = quick_refresh(control.reconciler)
    except PeriluneError as error:  # nothing can be recorded now, but what is recorded can be told
        echo(f"warning: showing the last known state: {error}", err=True)
        return
    if unseen:
        named = ", ".join(f"{run.stage} ({run.id})" for run in unseen[:3])
        more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
        echo(f"as seen last, not answering now: {named}{more}; perilune reconcile waits for them", err=True)


def show_events(events: Iterable[StageEvent]) -> StageEvent | None:
    """Show progress on stderr as events come; returns the last one."""
    from perilune.cli.console import stage_progress
    from perilune.cli.follow import show as show_event

    last: StageEvent | None = None
    with stage_progress() as view:
        for event in events:
            last = event
            show_event(event, view)
    return last


def brief(run: Run) -> dict[str, Any]:
    names = ("id", "stage", "state", "cause", "message", "retry_of")
    return {name: getattr(run, name) for name in names} | {"attempts": run.current_epoch}


def because(fields: dict[str, Any]) -> str:
    """Why something is in its state, on one line."""
    said = fields["message"].partition("\n")[0]
    return f" ({fields['cause']}: {said})" if fields["cause"] else ""


def checkpoint_folder(checkpoint: str) -> Path:
    """The folder of a checkpoint that is named by its path or by its run.

    Raises:
        RequestError: when it is neither, or the run has no checkpoint.
    """
    folder = Path(checkpoint).expanduser()
    if folder.is_dir() or checkpoint.startswith((".", "/", "~")):
        return folder
    from perilune.bundle.plugin import load_plugin
    from perilune.control.queries.lookup import find_run
    from perilune.control.runs.experiments import Control
    from perilune.errors import RequestError

    control = Control()
    run = find_run(control, checkpoint)
    plugin = load_plugin(run.task)
    if plugin.produces != "checkpoint":
        raise RequestError(f"a run of {run.task} makes no checkpoint", where=checkpoint)
    folder = control.directory(run) / plugin.output
    if not folder.is_dir():
        raise RequestError(
            f"the run is {run.state} and has no final checkpoint",
            where=checkpoint,
            remedy=f"perilune explain {run.id}",
        )
    return folder
