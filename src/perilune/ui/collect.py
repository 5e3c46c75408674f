"""Collects the data of the report from attempt directories."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import perilune
from perilune.learn.algorithms import ALGORITHMS
from perilune.learn.objective import objective_curve
from perilune.metrics.forgetting import ForgettingRow, forgetting_rows
from perilune.metrics.held_out import curve_notes
from perilune.metrics.lineage import find_parent_evaluation
from perilune.plural import plural
from perilune.ui.ages import age_chart
from perilune.ui.attempt import Attempt
from perilune.ui.changes import climb_chart, contribution_charts, difference_charts, select_measures
from perilune.ui.curves import Training, read_training, sum_by_part
from perilune.ui.episode_sets import index_episodes
from perilune.ui.episodes import RIGHT_REWARD, EpisodeLibrary, EpisodeSource, collect_episodes
from perilune.ui.evaluations import UNTRAINED, Comparison, Evaluation, compare_evaluations, read_evaluation
from perilune.ui.figures import (
    Figure,
    calibration_charts,
    difficulty_charts,
    environment_charts,
    length_charts,
    objective_chart,
    pass_at_k_charts,
    pass_rate_charts,
)
from perilune.ui.hardest import HardTask, find_hardest_tasks
from perilune.ui.hardware import Hardware, collect_hardware
from perilune.ui.headline import ALGORITHM_NAMES, Headline, write_headline
from perilune.ui.health import StageHealth, assess_stages
from perilune.ui.overview import (
    UNFINISHED_STATES,
    Fact,
    Notice,
    Stage,
    describe_machine,
    describe_results,
    describe_stage,
    format_day,
    list_facts,
    list_notices,
    list_placements,
    worst_state,
)
from perilune.ui.provenance import Provenance, collect_provenance
from perilune.ui.times import part_time_charts, timeline_charts
from perilune.ui.traces import TRACE_TASKS, sample_traces
from perilune.ui.view import ExperimentView, StageView

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LengthDynamics:
    """Causes of a change in the length of a stage's answers; `found` is the result of `length_dynamics`."""

    stage: str
    found: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration of process rewards: its findings as sentences, and its charts."""

    stage: str
    text: str
    figures: list[Figure]


@dataclass(frozen=True, slots=True)
class Forgetting:
    """The losses outside the trained task, as text; `note` has the warnings."""

    stage: str
    rows: list[ForgettingRow]
    note: str


@dataclass(frozen=True)
class ReportData:
    """All data of the page. report.js reads these field names.

    Attributes:
        climb: the comparison that the headline describes.
    """

    experiment: Mapping[str, Any]
    headline: Headline
    health: list[StageHealth]
    facts: list[Fact]
    notices: list[Notice]
    stages: list[Stage]
    evaluations: list[Evaluation]
    comparisons: list[Comparison]
    climb: Comparison | None
    measures: list[str]
    climb_chart: Figure | None
    differences: list[Figure]
    contributions: list[Figure]
    environments: list[Figure]
    tasks: list[Figure]
    lengths: list[Figure]
    hardest: list[HardTask]
    length_dynamics: list[LengthDynamics]
    calibrations: list[Calibration]
    forgetting: list[Forgetting]
    training: list[Training]
    times: list[Figure]
    hardware: Hardware | None
    machine_sentence: str
    placements: list[dict[str, Any]]
    provenance: Provenance
    footer: str
    library: EpisodeLibrary


def collect_report(view: ExperimentView, *, embed: bool = True) -> ReportData:
    """Read the files of every stage of `view`; without `embed`, episodes are only listed."""
    pairs = [(stage, Attempt(stage.attempt_dir)) for stage in view.stages]
    for stage, attempt in pairs:
        attempt.check_summary(partial(_read_summary, stage, attempt))
    attempts = [attempt for _, attempt in pairs]
    evaluations = _distinguish(_present(_evaluation(stage, attempt) for stage, attempt in pairs))
    trainings = _present(_training(stage, attempt) for stage, attempt in pairs)
    by_stage = {evaluation.stage: evaluation for evaluation in evaluations}
    comparisons, measures = _compare_with_parents(pairs, evaluations), select_measures(evaluations)
    main, trained = _find_main_comparison(pairs, comparisons, trainings)
    evaluated = [(by_stage[stage.name], attempt) for stage, attempt in pairs if stage.name in by_stage]
    sources = [EpisodeSource(stage.name, stage.task, attempt) for stage, attempt in pairs]
    library = _embed_episodes(sources) if embed else index_episodes(sources)
    provenance, state = collect_provenance(view, attempts), worst_state(view.stages)
    names = {stage.name for stage, _ in pairs}
    stages = [describe_stage(run, attempt, view.declared.get(run.name, {}), names) for run, attempt in pairs]
    return ReportData(
        experiment={"name": view.name, "state": state, "seed": view.seed},
        headline=write_headline(
            evaluations, main, trained, describe_results(pairs), is_over=state not in UNFINISHED_STATES
        ),
        health=assess_stages(pairs),
        facts=list_facts(view, attempts, provenance),
        notices=list_notices(pairs),  # last, because reading finds the damaged files
        stages=stages,
        evaluations=evaluations,
        comparisons=comparisons,
        climb=main,
        measures=measures,
        climb_chart=climb_chart(evaluations, comparisons),
        differences=difference_charts(comparisons, measures),
        contributions=contribution_charts(main),
        environments=environment_charts(evaluations),
        tasks=[
            *difficulty_charts(evaluations),
            *pass_at_k_charts(evaluations),
            *pass_rate_charts(evaluations),
            *_objective_charts(pairs),
            *_present(age_chart(stage.name, attempt) for stage, attempt in pairs),
        ],
        lengths=length_charts([(evaluation.label, attempt) for evaluation, attempt in evaluated]),
        hardest=find_hardest_tasks(evaluated),
        length_dynamics=_length_dynamics(pairs),
        calibrations=_calibrations(pairs),
        forgetting=_present(
            _forgetting(stage, attempt.summary.get("forgetting")) for stage, attempt in pairs
        ),
        training=trainings,
        times=[
            *timeline_charts(stages),
            *part_time_charts([(stage.name, sum_by_part(attempt.timings)) for stage, attempt in pairs]),
        ],
        hardware=collect_hardware([(stage.name, attempt) for stage, attempt in pairs]),
        machine_sentence=describe_machine(stages, provenance),
        placements=list_placements(view),
        provenance=provenance,
        footer=f"Written by Perilune {perilune.__version__} on {format_day(time.time())}."
        " This file is self-contained and loads nothing from other places.",
        library=library,
    )


def _embed_episodes(sources: Sequence[EpisodeSource]) -> EpisodeLibrary:
    library = collect_episodes(sources)
    traces = _present(
        sample_traces(source.stage, source.attempt) for source in sources if source.task in TRACE_TASKS
    )
    order = [source.stage for source in sources]
    library.stages = sorted([*traces, *library.stages], key=lambda episodes: order.index(episodes.stage))
    return library


def _read_summary(stage: StageView, attempt: Attempt) -> None:
    """Read all parts of a stage's summary that the report shows. Raises the errors of wrong types."""
    pairs = [(stage, attempt)]
    read_evaluation(stage.name, "", attempt.summary, {})
    _describe_warnings(attempt.summary)
    _forgetting(stage, attempt.summary.get("forgetting"))
    for read in (_length_dynamics, _calibrations, _objective_charts, describe_results):
        read(pairs)


def _length_dynamics(pairs: Sequence[tuple[StageView, Attempt]]) -> list[LengthDynamics]:
    dynamics = [(stage.name, attempt.summary.get("length_dynamics")) for stage, attempt in pairs]
    return [LengthDynamics(name, _read_lengths(value)) for name, value in dynamics if value]


def _read_lengths(found: Mapping[str, Any]) -> dict[str, Any]:
    def numbers(section: Mapping[str, Any], *keys: str) -> dict[str, float]:
        return {key: float(section[key]) for key in keys}

    def side(row: Mapping[str, Any], name: str) -> dict[str, float] | None:
        return numbers(row[name], "count", "length", "truncated") if row[name] else None

    rows = [
        {"difficulty": str(row["difficulty"]), "correct": bool(row["correct"])}
        | {name: side(row, name) for name in ("before", "after")}
        for row in found["table"]
    ]
    return numbers(found, "before", "after", "behaviour", "composition") | {"table": rows}


def _forgetting(stage: StageView, found: Any) -> Forgetting | None:
    if not isinstance(found, Mapping):
        return None
    note = "".join(f"Warning: {warning}. " for warning in found.get("warnings", ()))
    if "skipped" in found:
        note = f"Not measured: {found['skipped']}"
    return Forgetting(stage.name, forgetting_rows(found), note.strip())


def _present(found: Iterable[T | None]) -> list[T]:
    return [item for item in found if item is not None]


def _training(stage: StageView, attempt: Attempt) -> Training | None:
    if "steps" not in attempt.spec:
        return None
    return read_training(stage.name, stage.task, _describe_training(stage, attempt), attempt)


def _evaluation(stage: StageView, attempt: Attempt) -> Evaluation | None:
    if not attempt.summary:
        return None
    answers = attempt.scores(attempt.greedy_file) if attempt.greedy_file else []
    greedy = {score.task_id: score.reward >= RIGHT_REWARD for score in answers if score.reward is not None}
    label = _checkpoint_label(stage, attempt)
    return read_evaluation(stage.name, label, attempt.summary, greedy)


def _distinguish(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the evaluations; the labels of several of one checkpoint also name their stages."""
    count = Counter(one.label for one in evaluations)
    return [
        one if count[one.label] == 1 else replace(one, label=f"{one.label} ({one.stage})")
        for one in evaluations
    ]


def _checkpoint_label(stage: StageView, attempt: Attempt) -> str:
    """Return the label of the checkpoint that an evaluation judged."""
    checkpoint = attempt.spec.get("checkpoint")
    if checkpoint is None:
        return stage.name
    if checkpoint != "model":
        return f"after {checkpoint}"
    return UNTRAINED if (attempt.job.get("model") or {}).get("preset") else "base model"


def _compare_with_parents(
    pairs: Sequence[tuple[StageView, Attempt]], evaluations: Sequence[Evaluation]
) -> list[Comparison]:
    by_stage = {evaluation.stage: evaluation for evaluation in evaluations}
    checkpoints = {stage.name: attempt.spec.get("checkpoint") for stage, attempt in pairs}
    settings = {
        stage.name: {**attempt.spec, "environment": attempt.job.get("environment"), "checkpoint": None}
        for stage, attempt in pairs
        if stage.name in by_stage
    }
    parents = {stage: find_parent_evaluation(stage, checkpoints, settings) for stage in by_stage}
    return [
        compare_evaluations(by_stage[parent], by_stage[stage]) for stage, parent in parents.items() if parent
    ]


def _find_main_comparison(
    pairs: Sequence[tuple[StageView, Attempt]],
    comparisons: Sequence[Comparison],
    trainings: Sequence[Training],
) -> tuple[Comparison | None, Training | None]:
    """Return the comparison that judges the last rl stage, or else the last training, and that training.

    Without such a comparison, returns the last comparison, or else the last training.
    """
    checkpoints = {stage.name: attempt.spec.get("checkpoint") for stage, attempt in pairs}
    for task in ("rl", None):
        for training in reversed(trainings):
            for comparison in comparisons:
                if checkpoints[comparison.after] == training.stage and task in (training.task, None):
                    return comparison, training
    last = max(reversed(trainings), key=lambda training: training.task == "rl", default=None)
    return (comparisons[-1], None) if comparisons else (None, last)


def _describe_training(stage: StageView, attempt: Attempt) -> str:
    spec, summary = attempt.spec, attempt.summary
    algorithm = _algorithm_name(spec, summary) or stage.task
    name = ALGORITHM_NAMES.get(algorithm, algorithm)
    planned = int(spec.get("steps") or 0)
    done = sum(bool(step) for step in attempt.metrics.get("step", []))  # step 0 is before training
    steps = f"{done:,} of {plural(planned, 'step')}" if planned > done else plural(done, "step")
    return f"{steps} of {name}.{_describe_warnings(summary)}"


def _describe_warnings(summary: Mapping[str, Any]) -> str:
    text = "".join(f" Warning: {warning.rstrip('.')}." for warning in _list_warnings(summary))
    held_out = summary.get("held_out")
    if isinstance(held_out, Mapping):
        text += "".join(f" Held-out evaluation: {note}." for note in curve_notes(held_out))
    if (collapse := summary.get("collapse_step")) is not None:
        text += f" From step {collapse} on, even the chosen answers became unlikely."
    league = summary.get("league")
    if isinstance(league, Mapping):
        text += f" The published checkpoint is the champion, the policy of step {league['champion']}."
        signs = [f"{alarm['message']} (from step {alarm['step']})" for alarm in league["alarms"]]
        text += f" Signs of a collapse: {'; '.join(signs)}." if signs else " No sign of a collapse was found."
    gold = summary.get("gold")
    if isinstance(gold, Mapping) and (stop := gold.get("recommended_stop")) is not None:
        text += (
            f" The gold watch recommended to stop at step {stop}: the gold score was"
            f" {gold['at_recommended_stop']:.3f} there, {gold['best']:.3f} at best"
            f" (step {gold['best_step']}), and {gold['last']:.3f} at the end."
        )
    return text


def _list_warnings(summary: Mapping[str, Any]) -> list[str]:
    parts = [summary, summary.get("held_out") or {}, summary.get("forgetting") or {}]
    return [warning for part in parts for warning in part.get("warnings") or ()]


def _algorithm_name(spec: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    setting = spec.get("algorithm") or ""
    return str(summary.get("algorithm") or (setting.get("name") if isinstance(setting, dict) else setting))


def _calibrations(pairs: Sequence[tuple[StageView, Attempt]]) -> list[Calibration]:
    return [
        Calibration(
            stage.name,
            " ".join(f"{sentence[:1].upper()}{sentence[1:]}." for sentence in attempt.summary["sentences"]),
            calibration_charts(stage.name, attempt.summary),
        )
        for stage, attempt in pairs
        if attempt.summary.get("kind") == "calibration"
    ]


def _objective_charts(pairs: Sequence[tuple[StageView, Attempt]]) -> list[Figure]:
    """Return the implicit objective of the last rl stage, recorded or computed from its algorithm."""
    for stage, attempt in reversed(pairs):
        spec = attempt.spec
        algorithm = _algorithm_name(spec, attempt.summary)
        if stage.task != "rl" or not algorithm:
            continue
        samples = int(spec.get("samples") or 0)
        curve = attempt.summary.get("implicit_objective")
        compares = ALGORITHMS[algorithm].compares if algorithm in ALGORITHMS else ""
        if curve is None and samples > 1 and compares == "group":
            curve = objective_curve(algorithm, samples)
        if curve:
            label = ALGORITHM_NAMES.get(algorithm, algorithm)
            return [objective_chart(label, samples, curve)]
    return []
