"""The overview of an experiment: state, facts, notices and runs."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perilune.plural import plural
from perilune.ui.attempt import Attempt
from perilune.ui.provenance import Pairs, Provenance, find_model, format_document, stage_facts
from perilune.ui.traces import TRACE_TASKS
from perilune.ui.view import ExperimentView, StageView

Fact = tuple[str, str, str]  # name, value, detail
UNFINISHED_STATES = ("active", "queued", "waiting")


@dataclass(frozen=True, slots=True)
class Stage:
    """One run as the provenance section shows it.

    Attributes:
        parent: stage whose checkpoint it starts from; "" if it starts from the model or has no checkpoint.
        uses: (recipe field, stage) for each other stage whose output it reads.
    """

    name: str
    task: str
    parent: str
    uses: Pairs
    run_id: str
    state: str
    attempts: int
    cause: str
    digest: str
    seconds: float | None
    facts: Pairs
    summary: str
    spec: str
    log: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice above the results: `kind` is "failed", "active", "warning" or "damage"."""

    kind: str
    title: str
    text: str = ""
    log: str = ""


def describe_stage(
    stage: StageView, attempt: Attempt, declared: Mapping[str, Any], names: Collection[str]
) -> Stage:
    """Return one run for the provenance section.

    Args:
        declared: settings of the stage in the recipe, for a stage that has not begun.
        names: names of all stages.
    """
    facts = stage_facts(stage, attempt)
    spec = attempt.spec or declared
    read = {field: value for field, value in spec.items() if isinstance(value, str) and value in names}
    if stage.task in TRACE_TASKS and "rows" in attempt.summary:
        rows, rejected = attempt.summary["rows"], attempt.summary.get("rejected", 0)
        facts.append(("Traces", f"{rows:,} kept, {rejected:,} rejected"))
    if data := describe_data(attempt.summary):
        facts.append(("Data", data))
    return Stage(
        name=stage.name,
        task=stage.task,
        parent=read.pop("checkpoint", ""),
        uses=list(read.items()),
        run_id=stage.run_id,
        state=stage.state,
        attempts=stage.attempts,
        cause=stage.cause,
        digest=attempt.digest,
        seconds=attempt.run_seconds,
        facts=facts,
        summary=format_document(attempt.summary),
        spec=format_document(attempt.job),
        log=attempt.log_tail(),
    )


def list_placements(view: ExperimentView) -> list[dict[str, Any]]:
    """Return all attempts in the order of their stages; none if every stage ran here at the first try.

    The fields are those of `AttemptUse`, with the name of the stage and the seconds until its end, or so far.
    """
    names = {stage.run_id: stage.name for stage in view.stages}
    order = list(names)
    if all(attempt.number == 1 and attempt.placement == "local" for attempt in view.placed):
        return []
    placements = []
    for attempt in sorted(view.placed, key=lambda attempt: (order.index(attempt.run_id), attempt.number)):
        seconds = max(0.0, (attempt.ended or time.time()) - attempt.began)
        placements.append(asdict(attempt) | {"stage": names[attempt.run_id], "seconds": seconds})
    return placements


def worst_state(stages: Sequence[StageView]) -> str:
    """Return the state of the experiment: the worst state of its stages."""
    states = {stage.state for stage in stages}
    for state in ("failed", "cancelled", *UNFINISHED_STATES):
        if state in states:
            return state
    return "succeeded"


def list_notices(pairs: Sequence[tuple[StageView, Attempt]]) -> list[Notice]:
    """Return notices about failed and running stages, warnings of evaluations and damaged files.

    Call it last, because reading finds the damaged files.
    """
    notices = []
    for stage, attempt in pairs:
        if stage.state in ("failed", "cancelled"):
            title = f"Stage {stage.name} {'failed' if stage.state == 'failed' else 'was cancelled'}."
            cause = str(attempt.verdict.get("message") or stage.cause).partition("\n")[0].rstrip(".")
            text = f"{cause}. The report shows its results up to then." if cause else ""
            notices.append(Notice("failed", title, text, attempt.log_tail()))
        elif stage.state == "active":
            done, total, unit = (attempt.progress.get(key) for key in ("done", "total", "unit"))
            text = f"{done} of {total} {unit} were done when this was written." if total else ""
            notices.append(Notice("active", f"Stage {stage.name} is still running.", text))
        if attempt.summary.get("kind") == "evaluation":  # the description of a training has its warnings
            notices += [
                Notice("warning", f"Stage {stage.name}:", warning)
                for warning in attempt.summary.get("warnings", ())
            ]
        notices += [
            Notice("damage", f"A file of stage {stage.name} is damaged and was skipped.", problem)
            for problem in attempt.damage
        ]
    waiting = [stage.name for stage, _ in pairs if stage.state in ("queued", "waiting")]
    if waiting:
        notices.append(Notice("active", f"Not started: {', '.join(waiting)}."))
    return notices


def describe_results(pairs: Sequence[tuple[StageView, Attempt]]) -> list[str]:
    """Return the results of stages without curves and the data that stages trained on, as sentences."""
    return [
        f"Stage {stage.name} made {attempt.summary['rows']:,} verified traces and rejected "
        f"{attempt.summary.get('rejected', 0):,} candidates."
        for stage, attempt in pairs
        if stage.task in TRACE_TASKS and "rows" in attempt.summary
    ] + [
        f"Stage {stage.name} trained on {data}."
        for stage, attempt in pairs
        if (data := describe_data(attempt.summary))
    ]


def describe_data(summary: Mapping[str, Any]) -> str:
    """Return the rows and tokens that a stage trained on; empty for a stage that did not train on rows."""
    data = summary.get("data")
    names = ("rows", "tokens", "learned", "dropped", "truncated")
    if not isinstance(data, Mapping) or not all(isinstance(data.get(name), int) for name in names):
        return ""
    rare = "".join(f", {data[name]:,} {name}" for name in ("dropped", "truncated") if data[name])
    rows = plural(data["rows"], "row")
    return f"{rows}{rare}, {data['tokens']:,} tokens, {data['learned']:,} with loss"


def list_facts(view: ExperimentView, attempts: Sequence[Attempt], provenance: Provenance) -> list[Fact]:
    """Return the facts under the headline."""
    jobs = [attempt.job for attempt in attempts if attempt.job]
    environment = dict(jobs[-1].get("environment") or {}) if jobs else {}
    facts: list[Fact] = []
    if (model := find_model(attempts)) is not None:
        parameters, shape = model
        facts.append(("Model", f"{parameters:,} parameters" if parameters else "unknown size", shape))
    if environment:
        family, task = str(environment.get("id", "")), str(environment.get("task") or "")
        facts.append(("Environment", task or family, family if task else ""))
    if provenance.machine_name:
        threads = next((value for name, value in provenance.machine if name == "Cores"), "")
        facts.append(
            ("Machine", provenance.machine_name, threads.partition(" of ")[0] + " cores" * bool(threads))
        )
    seconds = [spent for attempt in attempts if (spent := attempt.run_seconds) is not None]
    if seconds:
        facts.append(("Time", format_duration(sum(seconds)), f"{len(seconds)} of {len(view.stages)} stages"))
    costs = [attempt.cost for attempt in view.placed if attempt.cost is not None]
    if costs:
        facts.append(("Cost", f"{sum(costs):.4f}", f"of rented machines, {len(costs)} attempts"))
    if times := [attempt.began for attempt in attempts if attempt.began is not None]:
        day, _, clock = format_day(min(times)).partition(", ")
        facts.append(("Date", day, clock))
    facts.append(("Seed", str(view.seed), ""))
    return facts


def describe_machine(stages: Sequence[Stage], provenance: Provenance) -> str:
    """Return the total time and the machine, as a sentence."""
    seconds = [stage.seconds for stage in stages if stage.seconds is not None]
    where = f" on {provenance.machine_name}" if provenance.machine_name else ""
    return f"All stages took {format_duration(sum(seconds))}{where}." if seconds else ""


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_day(moment: float) -> str:
    """Return seconds since the epoch as a date and time in UTC."""
    then = time.gmtime(moment)
    return f"{then.tm_mday} {time.strftime('%B %Y, %H:%M UTC', then)}"
