"""What an experiment found: one document for programs, the same figures in tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.files import read_json

if TYPE_CHECKING:
    from perilune.recipe.schema import Recipe, Stage
    from perilune.ui.view import StageView

BULKY = ("kind", "correct_per_task")  # parts of an evaluation's summary that the document leaves to its file


def results_document(
    recipe: Recipe, experiment: str, stages: Sequence[StageView], *, seconds: float, report: Path | None
) -> dict[str, Any]:
    """Everything found, as one JSON document; `stages` are those of `recipe`, in the same order."""
    summaries = {view.name: _summary(view) for view in stages}
    return {
        "experiment": experiment,
        "recipe": recipe.name,
        "seed": recipe.seed,
        "stages": [
            {
                "name": view.name,
                "task": view.task,
                "run": view.run_id,
                "state": view.state,
                "attempts": view.attempts,
                "seconds": summaries[view.name].get("seconds"),
            }
            for view in stages
        ],
        "evaluations": [
            {"stage": stage.name, "checkpoint": stage.consumes.get("checkpoint")}
            | {key: value for key, value in summaries[stage.name].items() if key not in BULKY}
            | _gain(recipe, stage, summaries)
            for stage in recipe.stages
            if _is_evaluation(summaries[stage.name])
        ],
        "report": str(report) if report else None,
        "bundles": {view.name: str(view.attempt_dir) for view in stages if view.attempt_dir},
        "seconds": round(seconds, 3),
    }


def print_results(document: Mapping[str, Any]) -> None:
    """Print tables of the evaluations, what was gained, and where everything lies, to stdout."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, 110))
    evaluations = document["evaluations"]
    if evaluations:
        console.print(_scores(evaluations))
        if any(evaluation.get("strategies") for evaluation in evaluations):
            console.print(_strategies(evaluations))
        for evaluation in evaluations:
            if gain := evaluation.get("gain"):
                console.print(
                    f"{evaluation['checkpoint']}: pass@1 {_points(gain['pass@1'])} over {gain['over']}"
                    f" (paired by task, {gain['tasks']} tasks)"
                )
    console.print(f"{document['recipe']}, seed {document['seed']}: {document['seconds']:.0f} s")
    for label, path in (("report", document["report"]), *document["bundles"].items()):
        if path:
            console.print(f"  {label:<12} {path}", soft_wrap=True)


def next_steps(document: Mapping[str, Any]) -> str:
    """What to try next, a command a line."""
    last = document["stages"][-1]["run"]
    trained = next((one["run"] for one in document["stages"] if one["task"] == "rl"), last)
    lines = [
        ("look at what the model wrote", f"open {document['report']}"),
        ("another seed", f"perilune run {document['recipe']} --seed {document['seed'] + 1}"),
        ("see it made again, bit for bit", f"perilune reproduce {trained}"),
        (
            "check that nothing was altered",
            f"perilune bundle verify {document['bundles'][_stage_of(document, trained)]}",
        ),
        ("other tasks to climb on", "perilune environments list"),
    ]
    return "\n".join(["Next:", *(f"  {what:<32} {command}" for what, command in lines)])


def _stage_of(document: Mapping[str, Any], run_id: str) -> str:
    return str(next(one["name"] for one in document["stages"] if one["run"] == run_id))


def _is_evaluation(summary: Mapping[str, Any]) -> bool:
    return summary.get("kind") == "evaluation"


def _summary(view: StageView) -> dict[str, Any]:
    path = view.attempt_dir / "artifacts" / "summary.json" if view.attempt_dir else None
    found: dict[str, Any] = read_json(path) if path and path.exists() else {}
    return found


def _gain(recipe: Recipe, evaluation: Stage, summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How much better the judged checkpoint is than the one it was trained from, if judged too."""
    from perilune.metrics.bootstrap import paired_difference

    trained = next((s for s in recipe.stages if s.name == evaluation.consumes.get("checkpoint")), None)
    parent = trained.consumes.get("checkpoint") if trained else None
    for before in recipe.stages:
        if not (
            parent and _is_evaluation(summaries[before.name]) and before.consumes.get("checkpoint") == parent
        ):
            continue
        old, new = _pass_rates(summaries[before.name]), _pass_rates(summaries[evaluation.name])
        shared = old.keys() & new.keys()  # a task without a verdict is missing from one of them
        if shared:
            difference = paired_difference(
                {t: old[t] for t in shared}, {t: new[t] for t in shared}, seed=recipe.seed
            )
            return {"gain": {"over": before.name, "tasks": len(shared), "pass@1": difference._asdict()}}
    return {}


def _pass_rates(summary: Mapping[str, Any]) -> dict[str, float]:
    return {task: correct / samples for task, samples, correct in summary["correct_per_task"]}


def _scores(evaluations: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    measures = [key for key in ("pass@1", "pass@8", "greedy") if any(one.get(key) for one in evaluations)]
    table = Table(title="Held-out tasks, with 95% intervals", title_justify="left")
    table.add_column("evaluation")
    for name in [*measures, "mean length", "tokens/s", "seconds"]:
        table.add_column(name, justify="right", no_wrap=True)
    for one in evaluations:
        cells = [_interval(one.get(key)) for key in measures]
        cells += [_number(one["length"]["mean"], ".1f")]
        cells += [_number(one.get("tokens_per_second"), ",.0f"), _number(one.get("seconds"), ".1f")]
        table.add_row(one["stage"], *cells)
    return table


def _strategies(evaluations: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="How tasks were attacked: share of answers, and how many of those were right")
    table.title_justify = "left"
    table.add_column("evaluation")
    names = sorted({name for one in evaluations for name in one.get("strategies") or ()})
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for one in evaluations:
        seen = one.get("strategies") or {}
        cells = [
            f"{seen[name]['share']:.1%}, {seen[name]['accuracy']:.1%} right" if name in seen else ""
            for name in names
        ]
        table.add_row(one["stage"], *cells)
    return table


def _interval(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    return f"{100 * value['mean']:.1f}% [dim]({100 * value['low']:.1f} to {100 * value['high']:.1f})[/]"


def _points(value: Mapping[str, float]) -> str:
    return f"{100 * value['mean']:+.1f} points ({100 * value['low']:+.1f} to {100 * value['high']:+.1f})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
