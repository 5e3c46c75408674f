"""The tools that read. Each returns the document that `--json` of the command prints, or a part of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from perilune.cli.arguments import RUN_HELP, WHERE_HELP
from perilune.cli.inspect.compare import compare_targets, comparison_document
from perilune.cli.inspect.history import explain_target, explanation_document
from perilune.cli.inspect.runs import show_document
from perilune.cli.train.results import paired_change, parent_change
from perilune.control.queries.lookup import (
    StageStatus,
    count_experiments,
    find_experiments,
    find_run,
    group_stage_statuses,
    latest_experiments,
)
from perilune.control.runs.experiments import Control
from perilune.control.runs.next_stage import read_recipe
from perilune.control.runs.requests import stream_log
from perilune.errors import RequestError

Target = Annotated[str, Field(description=RUN_HELP)]
OMITTED_FIELDS = frozenset(  # fields of a stage that all stages of an experiment share, or that `show` has
    {"experiment_id", "experiment", "overrides", "submitted", "requested", "created", "reachability"}
    | {"cleanup", "attempt_dir", "bundle_digest", "conditions"}
)
LISTED_FIELDS = frozenset(
    {"stage", "task", "state", "cause", "message", "pass@1"}
)  # of a list of all experiments
INTERNAL_FIELDS = frozenset(  # fields of a run and its attempts that only the control plane needs
    {"submit_key", "desired", "forced", "current_epoch", "not_before", "manifest_digest"}
    | {"bundle_digest", "cleanup", "unreachable_since"}
)


@dataclass(frozen=True)
class Reader:
    """The read tools over one home."""

    control: Control

    @property
    def tools(self) -> tuple[Callable[..., dict[str, Any]], ...]:
        """The tools, in the order in which an agent needs them."""
        return (
            self.runs,
            self.show,
            self.explain,
            self.compare,
            self.change,
            self.curves,
            self.episodes,
            self.logs,
            self.wiki_search,
        )

    def runs(
        self,
        experiment: Annotated[
            str, Field(description="Only experiments of this name, or the one whose id begins so.")
        ] = "",
        last: Annotated[
            int, Field(ge=1, le=1000, description="Number of experiments, the latest first.")
        ] = 20,
    ) -> dict[str, Any]:
        """List experiments, the latest first: overrides, and the state and pass@1 of each stage.

        `other_experiments` is the number of those that are not listed.
        With `experiment`: also the model, run ids, seconds, all final figures, and `change`, the gain in
        pass@1 over the checkpoint that training started from, paired by task.
        """
        control = self.control
        ids = find_experiments(control, experiment) if experiment else latest_experiments(control, last)
        groups = group_stage_statuses(control, ids)
        listed = [
            _experiment(stages) | (_details(control, stages) if experiment else {})
            for stages in groups.values()
            if stages
        ]
        newest = sorted(listed, key=lambda entry: entry["submitted"], reverse=True)
        others = count_experiments(control) - len(ids)
        return {"home": str(control.home.root), "experiments": newest, "other_experiments": others}

    def show(self, run: Target) -> dict[str, Any]:
        """One run: state, health with its reason and remedy, settings, checkpoints, attempts, final figures.

        `settings.spec` has the algorithm, lr and so on, `summary.forgetting` the change on other tasks.
        """
        document: dict[str, Any] = _compact(show_document(self.control, run))
        return document

    def explain(
        self, target: Annotated[str, Field(description=f"{RUN_HELP} Or an experiment.")]
    ) -> dict[str, Any]:
        """Explain the state of a run: its cause (of a failure, too), what happens next, and what to do."""
        return explanation_document(*explain_target(self.control, target))

    def compare(
        self,
        targets: Annotated[
            list[str],
            Field(
                min_length=1,
                description="Experiments or sweeps: ids, or names, each of all experiments that have it.",
            ),
        ],
        metric: Annotated[
            str,
            Field(
                description='STAGE.METRIC, as "after_rl.pass@4" or "rl.last.reward". '
                "Default: pass@1 of the last evaluation that most of them have."
            ),
        ] = "",
        baseline: Annotated[int, Field(ge=1, description="Number of the arm to compare with.")] = 1,
    ) -> dict[str, Any]:
        """Compare experiments: settings that differ, final figures, the best arm, and whether it is noise.

        Experiments that differ only in their seed are one arm. Its interval is over seeds, that of a seed
        over tasks; an interval over equal figures has no width, which is no certainty. `conclusion` states
        what the paired test over seeds shows; with fewer than three common seeds no claim is made.
        `difference.tasks` is over the tasks of these seeds only, and supports no claim about other seeds.
        """
        return comparison_document(compare_targets(self.control, targets, metric or None, baseline))

    def change(self, before: Target, after: Target) -> dict[str, Any]:
        """The change of pass@1 and pass@8 between two evaluations, with 95% intervals, paired by task.

        `tasks` counts the common tasks. Settings that differ, and so may explain the change, are listed.
        """
        (first, old), (second, new) = self._find(before), self._find(after)
        for run, attempt in ((before, old), (after, new)):
            if attempt.summary.get("kind") != "evaluation":
                raise RequestError(f"run {run} is no finished evaluation", remedy="runs lists the stages")
        change = paired_change(old.summary, new.summary)
        if not change:
            raise RequestError(f"{before} and {after} have no scored task in common")
        differing = [key for key in ("seed", "environment") if old.job.get(key) != new.job.get(key)]
        specs = [attempt.job.get("spec") or {} for attempt in (old, new)]
        keys = sorted((specs[0].keys() | specs[1].keys()) - {"checkpoint"})
        differing += [key for key in keys if specs[0].get(key) != specs[1].get(key)]
        return {"before": first, "after": second, **change, "settings_that_differ": differing}

    def curves(
        self,
        run: Target,
        figures: Annotated[
            list[str], Field(description="Metrics to return by step. Default: a summary of each metric.")
        ] = [],  # noqa: B006  # never changed
        points: Annotated[
            int, Field(ge=2, le=1000, description="Most steps with a value, evenly spaced.")
        ] = 50,
    ) -> dict[str, Any]:
        """The metrics of a training stage by step."""
        from perilune.ui.curves import sum_by_part, thin_columns

        identity, attempt = self._find(run)
        columns = {name: [_number(value) for value in values] for name, values in attempt.metrics.items()}
        steps = columns.get("step", [])
        if unknown := [name for name in figures if name not in columns]:
            raise RequestError(
                f"run {run} has no metric '{unknown[0]}'",
                remedy=f"one of: {', '.join(columns)}" if columns else "it recorded no step",
            )
        if figures:
            known = [
                row for row in range(len(steps)) if any(columns[name][row] is not None for name in figures)
            ]
            chosen = {name: [columns[name][row] for row in known] for name in ("step", *figures)}
            thinned = thin_columns(chosen, points)
            return {**identity, "steps": len(steps), "columns": thinned}
        extents = {name: _extent(steps, values) for name, values in columns.items() if name != "step"}
        seconds = sum_by_part(attempt.timings)
        return {**identity, "steps": len(steps), "seconds_by_part": seconds, "metrics": extents}

    def episodes(
        self,
        run: Target,
        set_name: Annotated[
            str, Field(description='One of the run\'s sets, as "step-000012" or "greedy". Default: all.')
        ] = "",
        where: Annotated[
            str, Field(description=f"Condition, such as 'reward < 1 and truncated'. {WHERE_HELP}")
        ] = "",
        most: Annotated[
            int, Field(ge=1, le=500, description="Number of episodes to show, the first ones.")
        ] = 5,
    ) -> dict[str, Any]:
        """Show what a model wrote, with rewards. Without `set_name` and `where`: the names of the sets.

        `read`, `fitting` and the means count all episodes, not only those that are shown. Without `set_name`
        they count every set together: an evaluation has one greedy answer per task in the set "greedy", and
        its pass@1 counts only the sampled answers in "step-...".
        """
        from perilune.data.episodes_file import read_episodes
        from perilune.traces.where import parse_where

        (identity, attempt), condition = self._find(run), parse_where(where)
        files = {path.stem: path for path in [*attempt.episode_files, attempt.greedy_file] if path}
        if not files or (set_name and set_name not in files):
            what = f"run {run} has no episodes" + (f" called '{set_name}'" if files else "")
            names = list(files)
            listed = ", ".join(names) if len(names) <= 6 else f"{names[0]} to {names[-1]}"
            raise RequestError(what, remedy=f"one of: {listed}" if files else "perilune runs")
        if not set_name and not where:
            return {**identity, "sets": list(files)}
        read = 0

        def fitting() -> Iterator[Any]:
            nonlocal read
            for name in [set_name] if set_name else files:
                episodes = read_episodes(files[name])
                read += len(episodes)
                yield from ((name, episode) for episode in filter(condition, episodes))

        figures = _summarize_episodes(fitting(), most)
        return {**identity, "set": set_name or "all", "read": read, **figures}

    def logs(
        self,
        run: Target,
        last: Annotated[int, Field(ge=1, le=1000, description="Number of lines, the last ones.")] = 40,
    ) -> dict[str, Any]:
        """The end of the log of a run."""
        identity, _ = self._find(run)
        lines = "".join(stream_log(self.control, identity["run"])).splitlines()
        return {**identity, "lines": len(lines), "text": "\n".join(lines[-last:])}

    def wiki_search(
        self,
        question: Annotated[str, Field(description="Words, or a question.")],
        most: Annotated[int, Field(ge=1, le=20, description="Number of passages.")] = 6,
    ) -> dict[str, Any]:
        """Passages of the wiki of this home: what people wrote about runs, with numbers from the evidence."""
        from perilune.wiki.build import Wiki
        from perilune.wiki.search import search_wiki

        passages = [
            {"page": hit.page, "score": score, "untrusted": {"heading": hit.heading, "text": hit.text}}
            for hit, score in search_wiki(Wiki.of(self.control), question, most)
        ]
        return {"question": question, "passages": passages}

    def _find(self, run: str) -> tuple[dict[str, str], Any]:
        """Return the ids and the stage of a run, and its current attempt."""
        from perilune.ui.attempt import Attempt

        found = find_run(self.control, run)
        identity = {"run": found.id, "experiment_id": found.experiment_id, "stage": found.stage}
        return identity, Attempt(Path(self.control.directory(found)))


def _summarize_episodes(episodes: Iterator[Any], most: int) -> dict[str, Any]:
    """Return counts of all episodes, and the first of them."""
    count = truncated = failed = tokens = 0
    rewards: list[float] = []
    rows: list[dict[str, Any]] = []
    for name, episode in episodes:
        count += 1
        truncated += episode.truncated
        failed += bool(episode.failure)
        tokens += episode.sampled
        rewards += [] if episode.reward is None else [episode.reward]
        if len(rows) < most:
            rows.append({"set": name, **_row(episode)})
    return {
        "fitting": count,
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "mean_sampled_tokens": tokens / count if count else None,
        "truncated": truncated,
        "failed": failed,
        "episodes": rows,
    }


def _row(episode: Any) -> dict[str, Any]:
    """Return an episode without its tokens, as JSON."""
    return {
        "id": episode.episode_id,
        "group": episode.group_id,
        "reward": episode.reward,
        "reward_terms": dict(episode.reward_terms),
        "metrics": dict(episode.metrics),
        "finish_reason": episode.finish_reason,
        "sampled_tokens": episode.sampled,
        "untrusted": {
            "task_id": episode.task_id,
            "messages": [dict(message) for message in episode.messages],
            "failure": episode.failure,
            "expected": episode.expected,
        },
    }


def _experiment(stages: Sequence[StageStatus]) -> dict[str, Any]:
    first = stages[0]
    listed = [_stage(stage) for stage in stages]
    return {
        "experiment_id": first.experiment_id,
        "name": first.experiment,
        "submitted": first.submitted,
        "overrides": first.overrides,
        "stages": [{key: row[key] for key in row if key in LISTED_FIELDS} for row in listed],
    }


def _details(control: Control, stages: Sequence[StageStatus]) -> dict[str, Any]:
    """Return the model of an experiment, and all figures of its stages with their changes."""
    rows = {stage.name: _stage(stage) for stage in stages}
    try:
        recipe = read_recipe(control, stages[0].experiment_id)
    except (RequestError, ValidationError):  # damaged, or of another version
        return {"stages": list(rows.values())}
    summaries = {stage.name: stage.summary for stage in stages}
    for stage in recipe.stages:
        if summaries[stage.name].get("kind") == "evaluation":
            rows[stage.name] |= parent_change(recipe, stage, summaries)
    model = recipe.model and (recipe.model.path or recipe.model.preset)
    return {"model": model, "seed": recipe.seed, "stages": list(rows.values())}


def _stage(stage: StageStatus) -> dict[str, Any]:
    """Return the fields of a stage that a list needs: identity, numbers, and measures with intervals."""
    fields: dict[str, Any] = {"stage": stage.name}
    for name, value in stage.document().items():
        if name in OMITTED_FIELDS or value is None or value == "":
            continue
        is_measure = isinstance(value, Mapping) and value.keys() == {"mean", "low", "high"}
        if is_measure or not isinstance(value, Mapping | list | tuple):
            fields[name] = value
    return fields


def _compact(value: Any) -> Any:
    """Return a document without internal and empty fields."""
    if isinstance(value, list | tuple):
        return [_compact(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    fields = {key: _compact(item) for key, item in value.items() if key not in INTERNAL_FIELDS}
    return {key: item for key, item in fields.items() if item is not None and item not in ("", {}, [])}


def _number(value: Any) -> Any:
    """Return the mean of a measure with an interval, and another value as it is."""
    return value.get("mean") if isinstance(value, Mapping) else value


def _extent(steps: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return the first, last, lowest and highest value of a metric, the latter two with their steps."""
    points = [
        (value, step) for step, value in zip(steps, values, strict=True) if isinstance(value, int | float)
    ]
    if not points:
        return {"values": 0}
    low, high = min(points, key=lambda point: point[0]), max(points, key=lambda point: point[0])
    if low[0] == high[0]:
        return {"always": low[0]}
    return {
        "first": points[0][0],
        "last": points[-1][0],
        "lowest": {"value": low[0], "step": low[1]},
        "highest": {"value": high[0], "step": high[1]},
    }
