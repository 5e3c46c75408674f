"""The results of an experiment: one document for programs, the same numbers in tables for people."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perilune.cli.output import as_markup, interval_markup, make_console, make_table
from perilune.metrics.lineage import find_parent_evaluation
from perilune.metrics.training import describe_training

if TYPE_CHECKING:
    from rich.console import Console

    from perilune.control.queries.lookup import StageStatus
    from perilune.plan.estimate import Estimate
    from perilune.recipe.schema import Recipe, Stage

OMITTED_KEYS = ("kind", "correct_per_task")  # left out of an evaluation's summary; the run has them
TRAINING_KEYS = ("first", "last", "validation", "validation_pairs")  # kept of a training summary
SUPERVISED = {"sft", "preference", "reward_model"}  # tasks that sample no answers


def results_document(
    recipe: Recipe,
    experiment: str,
    stages: Sequence[StageStatus],
    *,
    seconds: float,
    report: Path | None,
    estimated: Mapping[str, Estimate] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return all results as one JSON document. `stages` are those of `recipe`, in the same order."""
    from perilune.plan.estimate import compare_with_estimate

    summaries = {stage.name: stage.summary for stage in stages}
    return {
        "experiment_id": experiment,
        "recipe": recipe.name,
        "seed": recipe.seed,
        "stages": [
            {
                "name": stage.name,
                "task": stage.task,
                "run": stage.run_id,
                "state": stage.state,
                "attempts": stage.attempts,
                "seconds": stage.seconds,
                "estimated": asdict(estimated[stage.name]) if stage.name in estimated else None,
                "memory": stage.summary.get("memory"),
                "compared": compare_with_estimate(estimated.get(stage.name), stage.seconds, stage.summary),
                "warnings": list(stage.summary.get("warnings") or ()),
            }
            for stage in stages
        ],
        "evaluations": [
            {"stage": stage.name, "checkpoint": stage.consumes.get("checkpoint")}
            | {key: value for key, value in summaries[stage.name].items() if key not in OMITTED_KEYS}
            | parent_change(recipe, stage, summaries)
            for stage in recipe.stages
            if _is_evaluation(summaries[stage.name])
        ],
        "calibrations": [
            {"stage": row.name, **{key: row.summary[key] for key in ("sentences", "values", "differences")}}
            for row in stages
            if row.summary.get("kind") == "calibration"
        ],
        "forgetting": [
            {"stage": row.name, **row.summary["forgetting"]} for row in stages if "forgetting" in row.summary
        ],
        "training": [
            {"stage": row.name, **{key: row.summary[key] for key in TRAINING_KEYS if key in row.summary}}
            for row in stages
            if "last" in row.summary
        ],
        "held_out": [
            {"stage": row.name, **row.summary["held_out"]} for row in stages if "held_out" in row.summary
        ],
        "report": str(report) if report else None,
        "bundles": {row.name: str(row.attempt_dir) for row in stages if row.attempt_dir},
        "seconds": round(seconds, 3),
    }


def print_results(document: Mapping[str, Any]) -> None:
    """Print the evaluations side by side, the changes between them, and the paths of the files."""
    console = make_console()
    evaluations = document["evaluations"]
    if evaluations:
        console.print(_evaluation_table(evaluations))
    for stage in document["stages"]:
        for warning in stage["warnings"]:
            console.print(as_markup(f"warning: {stage['name']}: {warning}"))
    for sentence in (text for evaluation in evaluations for text in _describe_changes(evaluation)):
        console.print(sentence)
    _print_training(console, document)
    for entry in document["held_out"]:
        print_held_out(console, entry)
    for entry in document["forgetting"]:
        print_forgetting(console, entry)
    for entry in document["calibrations"]:
        for sentence in entry["sentences"]:
            console.print(as_markup(f"{entry['stage']}: {sentence}"))
    _print_estimates(console, document["stages"])
    cost = f", cost {document['cost']:.4g}" if document.get("cost") is not None else ""
    console.print(f"{document['recipe']}, seed {document['seed']}: {document['seconds']:.0f} s{cost}\n")
    for label, path in (("report", document["report"]), *document["bundles"].items()):
        if path:
            console.print(as_markup(f"  {label:<12} {path}"), soft_wrap=True)


def next_steps(document: Mapping[str, Any], rerun: str) -> str:
    """List commands to try next; `rerun` is the command that made the document."""
    trained = next((stage for stage in document["stages"] if stage["task"] == "rl"), document["stages"][-1])
    answered = document["evaluations"] or any(stage["task"] not in SUPERVISED for stage in document["stages"])
    rerun = re.sub(r" --set seed=\d+", "", rerun)  # the suggested commands choose their own seeds
    lines = [
        ("read the model's answers" if answered else "see the curves", _open_command(document["report"])),
        *(("ask the model", command) for command in _chat_command(document)),
        ("run with another seed", f"{rerun} --seed {document['seed'] + 1}"),
        *(("repeat it over three seeds", command) for command in _sweep_command(document, rerun)),
        ("reproduce it bit for bit", f"perilune reproduce {trained['run']}"),
        ("check the files", f"perilune bundle verify {trained['run']}"),
        *([("list more environments", "perilune environments list")] if answered else []),
    ]
    return "\n".join(["Next:", *(f"  {purpose:<26} {command}" for purpose, command in lines)])


def _chat_command(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command that chats with the last trained model, if there is one."""
    from perilune.bundle.plugin import load_plugin

    for stage in reversed(document["stages"]):
        plugin = load_plugin(stage["task"])
        folder = Path(document["bundles"].get(stage["name"], "")) / plugin.output
        if plugin.produces == "checkpoint" and (folder / "tokenizer.json").is_file():
            from perilune.models.text.tokenizer import Tokenizer

            plain = " --plain" if Tokenizer.load(folder).chat_template is None else ""
            yield f"perilune chat {document['recipe']}/{stage['name']}{plain}"
            return


def _sweep_command(document: Mapping[str, Any], rerun: str) -> Iterator[str]:
    """Yield the command that runs seeds 0 to 2 and compares them, if the recipe evaluates anything.

    A sweep reads a value with a comma or two dots as several values.
    """
    command, _, options = rerun.partition(" run ")
    if document["evaluations"] and options and "," not in options and ".." not in options:
        yield f"{command} sweep {options} --seeds 3"


def _open_command(report: str) -> str:
    """Return the command that opens the report here; its address where there is none."""
    opener = next((name for name in ("xdg-open", "open") if shutil.which(name)), None)
    return f"file://{report}" if opener is None else f"{opener} {shlex.quote(report)}"


def _is_evaluation(summary: Mapping[str, Any]) -> bool:
    return summary.get("kind") == "evaluation"


def parent_change(
    recipe: Recipe, evaluation: Stage, summaries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    from perilune.recipe.schema import build_job

    checkpoints = {stage.name: stage.consumes.get("checkpoint") for stage in recipe.stages}
    # Jobs have all settings, also those that a stage takes from the recipe.
    jobs = [build_job(recipe, stage) for stage in recipe.stages if _is_evaluation(summaries[stage.name])]
    settings = {job.stage: {**job.spec, "environment": job.environment, "checkpoint": None} for job in jobs}
    before = find_parent_evaluation(evaluation.name, checkpoints, settings)
    if before is None:
        return {}
    change = paired_change(summaries[before], summaries[evaluation.name])
    return {"change": {"against": before, **change}} if change else {}


def paired_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of pass@1 and pass@8 between two summaries on their common tasks; {} without any."""
    from perilune.metrics.proportion import pass_at_k_change

    change: dict[str, Any] = {}
    for k in (1, 8):
        if paired := pass_at_k_change(before["correct_per_task"], after["correct_per_task"], k):
            change |= {f"pass@{k}": paired[0]._asdict()}
            change.setdefault("tasks", paired[1])
    return change


def _evaluation_table(evaluations: Sequence[Mapping[str, Any]]) -> Any:
    table = make_table("held-out tasks", *(evaluation["stage"] for evaluation in evaluations))

    def row(label: str, cells: Sequence[str], *, end_section: bool = False) -> None:
        if any(cells):
            table.add_row(label, *cells, end_section=end_section)

    for measure in ("pass@1", "pass@8", "greedy"):
        row(measure, [_format_interval(entry.get(measure)) for entry in evaluations])
    for part in sorted({part for entry in evaluations for part in entry.get("by_environment") or ()}):
        values = [(entry.get("by_environment") or {}).get(part) or {} for entry in evaluations]
        row(f"pass@1 in {as_markup(part)}", [_format_interval(figures.get("pass@1")) for figures in values])
    row("in the expected form", [_format_number(entry.get("format"), ".1%") for entry in evaluations])
    row("live groups", [_format_interval(entry.get("live_groups")) for entry in evaluations])
    row("mean length", [_format_number(entry["length"]["mean"], ".1f") for entry in evaluations])
    row("tokens/s", [_format_number(entry.get("tokens_per_second"), ",.0f") for entry in evaluations])
    row("seconds", [_format_number(entry.get("seconds"), ".1f") for entry in evaluations], end_section=True)
    names = sorted({name for entry in evaluations for name in entry.get("strategies") or ()})
    for name in names:
        values = [(entry.get("strategies") or {}).get(name) for entry in evaluations]
        row(f"answers: {as_markup(name)}", [_format_strategy(value) for value in values])
    return table


def _print_estimates(console: Console, stages: Sequence[Mapping[str, Any]]) -> None:
    timed = [stage for stage in stages if stage["estimated"] and stage["seconds"]]
    if not timed:
        return
    expected = sum(stage["estimated"]["seconds"] for stage in timed)
    took = sum(stage["seconds"] for stage in timed)
    console.print(f"time: estimated {expected:,.0f} s, took {took:,.0f} s ({took / expected - 1:+.0%})")
    largest = max(timed, key=lambda stage: (stage["memory"] or {}).get("peak_bytes", 0))
    if "memory" in largest["compared"]:
        console.print(as_markup(f"memory of {largest['name']}: {largest['compared']['memory']}"))


def _print_training(console: Console, document: Mapping[str, Any]) -> None:
    """Print the figures of the stages whose checkpoint no stage evaluates."""
    evaluated = {evaluation["checkpoint"] for evaluation in document["evaluations"]}
    for stage in document["training"]:
        if stage["stage"] not in evaluated and (sentence := describe_training(stage)):
            console.print(as_markup(f"{stage['stage']}: {sentence}"))


def print_held_out(console: Console, entry: Mapping[str, Any]) -> None:
    """Print the evaluations during the training of a stage as a table, with notes and warnings."""
    from perilune.metrics.held_out import curve_notes, curve_rows

    head, *rows = curve_rows(entry)
    table = make_table(f"{entry['stage']}: {head[0]}", *head[1:], left=0)
    for row in rows:
        table.add_row(*map(as_markup, row))
    console.print(table)
    for note in (*curve_notes(entry), *(f"warning: {warning}" for warning in entry["warnings"])):
        console.print(as_markup(f"{entry['stage']}: {note}"))


def print_forgetting(console: Console, entry: Mapping[str, Any]) -> None:
    """Print the forgetting in the training of a stage as a table, with warnings."""
    from perilune.metrics.forgetting import forgetting_rows

    if "skipped" in entry:
        console.print(as_markup(f"{entry['stage']}: forgetting was not measured: {entry['skipped']}"))
    else:
        table = make_table(f"forgetting in {entry['stage']}", "before", "after", "change")
        for row in forgetting_rows(entry):
            table.add_row(*map(as_markup, row))
        console.print(table)
    for warning in entry.get("warnings", ()):
        console.print(as_markup(f"warning: {entry['stage']}: {warning}"))


def _format_strategy(value: Mapping[str, float] | None) -> str:
    return "" if value is None else f"{value['share']:.1%} [dim]({value['accuracy']:.1%} right)[/]"


def _format_interval(value: Mapping[str, float] | None) -> str:
    return "" if value is None else interval_markup(value["mean"], value["low"], value["high"])


def _describe_changes(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the change of pass@1, if it is known, and a clear fall of pass@8."""
    if change := evaluation.get("change"):
        yield _describe_change(evaluation["checkpoint"], change)
        if (change.get("pass@8") or {"high": 0.0})["high"] < 0:
            yield f"{_describe_change(evaluation['checkpoint'], change, 'pass@8')}: it solves fewer of them"
    if past := evaluation.get("recorded"):
        change = {"against": "the recorded episodes", "tasks": past["tasks"], "pass@1": past["change"]}
        yield _describe_change(evaluation["checkpoint"] or "the model", change)


def _describe_change(checkpoint: str, change: Mapping[str, Any], measure: str = "pass@1") -> str:
    mean, low, high = (100 * change[measure][key] for key in ("mean", "low", "high"))
    tasks = f"against {change['against']} on the same {change['tasks']} tasks"
    if low > 0:
        return f"{checkpoint} gained {mean:.1f} points of {measure} ({low:.1f} to {high:.1f}) {tasks}"
    if high < 0:
        return f"{checkpoint} lost {-mean:.1f} points of {measure} ({-high:.1f} to {-low:.1f}) {tasks}"
    interval = f"({mean:+.1f} points, {low:+.1f} to {high:+.1f})"
    limit = f", on which less than {(high - low) / 2:.1f} points would not show" if high > low else ""
    return f"{checkpoint}: no clear change of {measure} {interval} {tasks}{limit}"


def _format_number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
