"""Commands that list runs, show one and print its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import Json, RunArgument, format_reason, open_control, open_run
from perilune.cli.inspect.run_table import describe_doubts, format_interval, print_runs
from perilune.cli.machines.rented import warn_about_cleanup
from perilune.cli.output import echo, make_console, print_json, wrap_text, write
from perilune.cli.train.results import print_forgetting, print_held_out
from perilune.metrics.health.verdict import Health
from perilune.metrics.training import training_figures

if TYPE_CHECKING:
    from perilune.control.queries.lookup import StageStatus
    from perilune.control.runs.experiments import Control


def runs(
    experiment: Annotated[
        str | None,
        typer.Argument(help="List only this experiment: its name, or the first characters of its id."),
    ] = None,
    *,
    last: Annotated[
        int, typer.Option("--last", "-n", min=1, help="Number of the latest experiments to list.")
    ] = 20,
    everything: Annotated[bool, typer.Option("--all", help="List all experiments.")] = False,
    as_json: Json = False,
) -> None:
    """List the runs of the latest experiments, in the order of their stages.

    \b
    perilune runs
    perilune runs quickstart --json
    perilune runs --all
    """
    control = open_control()
    statuses, more = select_runs(control, experiment, None if everything else last)
    if as_json:
        print_json(runs_document(control, statuses, more))
    elif statuses:
        warn_about_cleanup(control)
        print_runs(statuses)
        if more and experiment is None:
            echo(f"{more:,} older experiments: perilune runs --all")
    else:
        echo("no runs yet; try: perilune quickstart")


def select_runs(control: Control, experiment: str | None, last: int | None) -> tuple[list[StageStatus], int]:
    """Return the stages of one experiment or of the `last` ones (None: all), and the number left out."""
    from perilune.control.queries.lookup import (
        count_experiments,
        find_experiment,
        latest_experiments,
        stage_statuses,
    )

    named = experiment is not None
    chosen = [find_experiment(control, experiment).id] if named else latest_experiments(control, last)
    return stage_statuses(control, chosen), count_experiments(control) - len(chosen)


def runs_document(control: Control, statuses: Sequence[StageStatus], more: int) -> dict[str, Any]:
    listed = [status.document() for status in statuses]
    return {"home": str(control.home.root), "runs": listed, "other_experiments": more}


def show(run: RunArgument, as_json: Json = False) -> None:
    """Show one run: its state and cause, attempts, metrics and files.

    \b
    perilune show rl
    perilune show quickstart/rl --json
    """
    from perilune.plan.estimate import compare_with_estimate, load_estimate

    control = open_control()
    document = show_document(control, run)
    if as_json:
        print_json(document)
        return
    echo(f"run {document['run']}: stage {document['stage']} of {document['experiment']}")
    echo(f"  state      {document['state']}{format_reason(document)}")
    health = document["health"]
    echo(wrap_text(f"  health     {health['line']}", indent=13))
    for finding in health["findings"][:1]:
        echo(wrap_text(f"             {finding['remedy']}", indent=13))
    for condition in document["conditions"]:
        echo(f"  error      {condition['about']}: {condition['message']}")
    for attempt in document["attempts"]:
        where = f"{attempt['placement']}/{attempt['launcher']}"
        doubt = describe_doubts(attempt["state"], attempt["reachability"], attempt["cleanup"])
        echo(f"  attempt {attempt['number']}  {attempt['state']} on {where}{doubt}{format_reason(attempt)}")
        if attempt["container"]:
            echo(f"             image {attempt['container']['image_id']}")
    if document["retry_of"]:
        echo(f"  retry of   {document['retry_of']}")
    for warning in document["summary"].get("warnings") or ():
        echo(wrap_text(f"  warning    {warning}", indent=13))
    for name, value in (_summary_lines(document["summary"]) | training_figures(document["summary"])).items():
        echo(f"  {name:<22} {value}")
    took = document["ended"] and document["ended"] - document["created"]
    estimated = load_estimate(control.home.experiment(document["experiment_id"])).get(document["stage"])
    for name, value in compare_with_estimate(estimated, took, document["summary"]).items():
        echo(f"  {name:<22} {value}")
    for name, print_table in (("held_out", print_held_out), ("forgetting", print_forgetting)):
        if figures := document["summary"].get(name):
            print_table(make_console(), {"stage": document["stage"], **figures})
    echo(f"  bundle     {document['bundle_digest']}\n             {document['bundle']}")
    echo(f"  files      {document['directory']}")


def show_document(control: Control, run: str) -> dict[str, Any]:
    """Return everything recorded about a run, its settings, and the verdict on its health, as JSON."""
    from perilune.control.queries.lookup import find_run, run_document
    from perilune.ui.attempt import Attempt
    from perilune.ui.health import assess_attempt, describe_failure

    document = run_document(control, record := find_run(control, run))
    here = not control.reconciler.placements.capabilities(record.id).is_remote
    attempt = Attempt(Path(document["directory"]))
    health = assess_attempt(attempt, here=here)
    if record.state == "failed":
        failure = describe_failure(attempt, record.id, record.message or record.cause)
        health = Health("broken", (failure, *health.findings))
    settings = {key: attempt.job.get(key) for key in ("seed", "model", "environment", "spec")}
    checkpoints = [str(path) for path in attempt.checkpoints]
    return document | {"settings": settings, "checkpoints": checkpoints, "health": health.document()}


def _summary_lines(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a summary that fit on a line: numbers, texts, and measures with their interval."""
    lines = {}
    for name, value in summary.items():
        if isinstance(value, float):
            lines[name] = f"{value:,.4g}"
        elif isinstance(value, int | str):
            lines[name] = f"{value:,}" if type(value) is int else str(value)
        elif isinstance(value, Mapping) and value.keys() == {"mean", "low", "high"}:
            lines[name] = format_interval(value)
    for part, figures in (summary.get("by_environment") or {}).items():
        if "pass@1" in figures:  # a part without a scored answer has none
            lines[f"pass@1 in {part}"] = format_interval(figures["pass@1"])
    return lines


def logs(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the log of a run, of all its attempts; -f follows it.

    Control characters are printed in escaped form: \\x1b stands for ESC. Of a very long log, the first 8 MiB
    and at least the last 16 MiB are kept. The folder runtime/ of the attempt has the original bytes.

    \b
    perilune logs rl -f
    """
    from perilune.control.runs.requests import stream_log

    control, record = open_run(run)
    text = stream_log(control, record.id, follow=follow)
    if as_json:
        print_json({"run": record.id, "stage": record.stage, "lines": "".join(text).splitlines()})
        return
    printed = False
    for chunk in text:
        printed = printed or bool(chunk)
        write(chunk)
    if not printed:
        echo(f"the log is empty; for the state of the run: perilune explain {record.id}", err=True)
