"""The loop of flywheel: each round samples, trains and evaluates, and records yield, gain and cost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.records import Provenance, TraceRecord, write_records
from perilune.environments.core.protocol import Task, Transcript
from perilune.environments.core.rewards import GOLD_METRIC
from perilune.errors import WorkFailedError
from perilune.learn.algorithms import algorithm
from perilune.learn.batch import pack
from perilune.learn.schedules import learning_rate
from perilune.learn.trainer import Learner
from perilune.metrics.bootstrap import Interval
from perilune.metrics.flywheel import gain_interval, likelihood_ratio, rounds_to
from perilune.metrics.proportion import pass_rate_interval
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.tasks.datasets.own_traces import most_likely, sampling_provenance, to_record
from perilune.tasks.flywheel.stage import HELD_OUT_SAMPLES, FlywheelSpec
from perilune.tasks.stage.memory_plan import memory_figures
from perilune.tasks.stage.outcomes import PASS_REWARD
from perilune.tasks.stage.player import Player, open_player
from perilune.tasks.stage.policy import heldout_tasks
from perilune.tasks.stage.publishing import Publisher
from perilune.tasks.stage.training import StepReport, TrainingLoop
from perilune.tasks.supervised.demonstrations import Demonstrations
from perilune.tasks.supervised.tokens import RowReader
from perilune.watchdog import Watchdog

GOAL_PASS_RATE = 0.9  # the summary predicts the number of rounds to this pass rate


def run(workspace: Workspace, spec: FlywheelSpec) -> dict[str, Any]:
    """Run the rounds and return the stage's summary."""
    with open_player(workspace, spec.max_tokens, spec, spec.memory_plan) as player:
        learner = Learner(player.policy.decoder, spec)
        loop = TrainingLoop(workspace, learner, spec)
        rounds = Rounds(workspace, spec, player, learner)
        if loop.completed_steps == 0:
            workspace.rewind(-1)
            rounds.begin()

        def step(done: int, watch: Stopwatch) -> StepReport | None:
            if rounds.stalled:
                return None
            sampled = rounds.sample(done + 1, watch)
            with watch.measure("learning"):
                rounds.train(done + 1)
            return rounds.evaluate(done + 1, sampled, watch)

        loop.run(step)
    summary = rounds.summary()  # `finish` may load the learner's state of the best round
    assert player.memory is not None
    memory = memory_figures(player.memory, player.device)
    return {**loop.finish(player.policy), **summary, "memory": memory}


@dataclass(frozen=True)
class Sampled:
    """The result of a round's sampling.

    Attributes:
        kept: number of records written.
        counts: number of answers by label ("right", "wrong", "unknown"), and number of those that passed
            ("right kept", "wrong kept", "unknown kept").
        tokens: number of sampled tokens.
    """

    kept: int
    counts: Counter[str]
    tokens: int


class Rounds:
    """The rounds of one stage. All state is in the learner's memory and the trace files, so it can resume."""

    def __init__(self, workspace: Workspace, spec: FlywheelSpec, player: Player, learner: Learner) -> None:
        self._workspace, self._spec, self._player, self._learner = workspace, spec, player, learner
        self._publisher = Publisher(player.engine, learner)
        self._publisher.publish()  # the engine lacks the weights of a resumed checkpoint
        self._heldout = heldout_tasks(player.environment, spec.heldout, workspace.job.seed)
        self._tasks = player.training_tasks(skip=learner.memory.get("tasks", 0))
        self._traces = workspace.artifacts / "traces"

    def begin(self) -> None:
        """Evaluate the policy before the first round."""
        self._learner.memory["rates"] = []
        self._workspace.metric(0, **self._figures(0, self._pass_rate(0), {}))

    @property
    def stalled(self) -> bool:
        """True if the interval of the last round's gain includes 1: the round may have gained nothing."""
        gain = self._last_gain
        return gain is not None and gain.low <= 1

    @property
    def _last_gain(self) -> Interval | None:
        rates = self._learner.memory["rates"]
        return self._gain(rates[-2:]) if len(rates) > 1 else None

    def _gain(self, rates: Sequence[Mapping[str, float]]) -> Interval:
        """Return the gain per round over rounds, from the tasks that have a verdict in all of them.

        Args:
            rates: the pass rates by task, one mapping for each round.
        """
        shared = set.intersection(*map(set, rates))
        kept = [{task: row[task] for task in shared} for row in rates]
        return gain_interval(kept, seed=self._workspace.job.seed)

    def sample(self, number: int, watch: Stopwatch) -> Sampled:
        """Answer new tasks, and write the most likely passing answer of each as a training record."""
        spec = self._spec
        tasks = self._tasks.take(spec.tasks)
        self._learner.memory["tasks"] = self._learner.memory.get("tasks", 0) + len(tasks)
        groups = self._player.play(
            tasks,
            samples=spec.samples,
            temperature=spec.temperature,
            step=2 * number,
            watch=watch,
            total=spec.tasks * spec.samples,
        )
        kept = _best_records(self._publisher.check_versions(groups), sampling_provenance(self._workspace.job))
        write_records(self._traces / f"round-{number:03d}.jsonl", kept)
        if not any(self._all_traces(number)):
            raise WorkFailedError(
                f"none of {len(tasks) * spec.samples:,} answers passed: there is nothing to train on",
                where=f"round {number}",
                remedy="start from a checkpoint that solves some tasks, or raise samples",
            )
        tokens = sum(episode.sampled for group in groups for episode in group)
        return Sampled(len(kept), self._labels(tasks, groups), tokens)

    def train(self, number: int) -> None:
        """Train on the traces of all rounds so far."""
        spec, decoder = self._spec, self._learner.decoder
        reader = RowReader(self._player.policy.tokenizer, decoder.config.max_position_embeddings)
        traces = Demonstrations(self._all_traces(number), reader, self._workspace.job.seed)
        sft = algorithm("sft")
        with Watchdog("learning") as waiting:
            for update in range((number - 1) * spec.updates, number * spec.updates):
                batch = traces.batch(update, spec.batch_size)
                figures = self._learner.forward_backward(pack([sft(batch, max_tokens=0)], spec.token_budget))
                self._learner.optim_step(learning_rate(spec, update, spec.steps * spec.updates))
                self._workspace.progress(
                    update + 1, spec.steps * spec.updates, "updates", loss=figures["loss"]
                )
                waiting.progress()
        self._publisher.publish()

    def evaluate(self, number: int, sampled: Sampled, watch: Stopwatch) -> StepReport:
        """Measure the pass rate on held-out tasks, and the gain over the previous round."""
        counts = sampled.counts
        answers = self._spec.tasks * self._spec.samples
        figures: dict[str, Any] = {
            "accept_rate": (counts["right kept"] + counts["wrong kept"] + counts["unknown kept"]) / answers,
            "rows": sampled.kept,
            "tokens_per_row": sampled.tokens / max(sampled.kept, 1),
        }
        if counts["right"] and counts["wrong"]:
            ratio = likelihood_ratio(
                counts["right kept"], counts["right"], counts["wrong kept"], counts["wrong"]
            )
            figures |= _interval_figures("verifier_ratio", ratio)
        metrics = self._figures(number, self._pass_rate(number), figures)
        seconds = {"seconds_per_row": watch.elapsed / max(sampled.kept, 1)}
        return StepReport(metrics, {"pass_rate": metrics["pass_rate"]}, seconds)

    def summary(self) -> dict[str, Any]:
        """Return the pass rates by round, the gain per round, and the reason why the rounds ended."""
        rates = self._learner.memory["rates"]
        seed = self._workspace.job.seed
        intervals = [pass_rate_interval(list(round_rates.values()), seed=seed) for round_rates in rates]
        summary: dict[str, Any] = {
            "algorithm": "flywheel",
            "environment": self._player.environment.id,
            "rounds": len(rates) - 1,
            "pass_rates": [interval._asdict() for interval in intervals],
            "stopped": "a round may have gained nothing" if self.stalled else "all rounds done",
        }
        if len(rates) > 1:
            gain = self._gain(rates)
            summary["gain"] = gain._asdict()
            last = min(max(intervals[-1].mean, 1e-6), 1 - 1e-6)
            if last < GOAL_PASS_RATE and gain.mean > 1:
                summary[f"rounds_to_{GOAL_PASS_RATE:g}"] = rounds_to(last, GOAL_PASS_RATE, gain.mean)
        return summary

    def _pass_rate(self, number: int) -> Interval:
        groups = self._player.play(
            self._heldout,
            samples=HELD_OUT_SAMPLES,
            temperature=self._spec.temperature,
            step=2 * number + 1,
            watch=Stopwatch(),
        )
        judged = [[episode for episode in group if not episode.failure] for group in groups]
        rates = {group[0].task_id: sum(map(_passed, group)) / len(group) for group in judged if group}
        self._learner.memory["rates"] = [*self._learner.memory["rates"], rates]
        return pass_rate_interval(list(rates.values()), seed=self._workspace.job.seed)

    def _figures(self, number: int, rate: Interval, figures: dict[str, Any]) -> dict[str, Any]:
        gain = self._last_gain
        if gain is not None:
            figures |= _interval_figures("gain", gain)
        grown = "" if gain is None else f", odds x {gain.mean:.2f}"
        self._workspace.log(f"round {number}: {rate.mean:.1%} of held-out answers right{grown}")
        return {**_interval_figures("pass_rate", rate), **figures}

    def _all_traces(self, number: int) -> list[Path]:
        paths = [self._traces / f"round-{earlier:03d}.jsonl" for earlier in range(1, number + 1)]
        return [path for path in paths if path.stat().st_size]

    def _labels(self, tasks: Sequence[Task], groups: Groups) -> Counter[str]:
        """Count answers by label and by whether they passed; see `Sampled.counts`.

        The label does not depend on the trained reward: it comes from the gold score, or from `is_right` of
        the environment.
        """
        by_id = {task.task_id: task for task in tasks}
        counts: Counter[str] = Counter()
        for episode in (episode for group in groups for episode in group if not episode.failure):
            label = self._label(by_id[episode.task_id], episode)
            counts[label] += 1
            counts[f"{label} kept"] += _passed(episode)
        return counts

    def _label(self, task: Task, episode: Episode) -> str:
        if GOLD_METRIC in episode.metrics:
            return "right" if episode.metrics[GOLD_METRIC] >= PASS_REWARD else "wrong"
        opinion = getattr(self._player.environment, "is_right", lambda task, transcript: None)
        answer = Transcript(episode.text, not episode.truncated)
        return {True: "right", False: "wrong", None: "unknown"}[opinion(task, answer)]


def _passed(episode: Episode) -> bool:
    """Return whether the answer passed: right by its reward, and not truncated."""
    return episode.reward is not None and episode.reward >= PASS_REWARD and not episode.truncated


def _best_records(groups: Groups, provenance: Provenance) -> list[TraceRecord]:
    """Return the most likely passing answer of each group, without duplicates."""
    best = (most_likely([episode for episode in group if _passed(episode)]) for group in groups)
    records: dict[str, TraceRecord] = {}
    for record in (to_record(episode, provenance) for episode in best if episode is not None):
        records.setdefault(record.digest, record)
    return list(records.values())


def _interval_figures(name: str, interval: Interval) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
