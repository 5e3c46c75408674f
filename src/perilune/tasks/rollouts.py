"""From tasks to scored episodes: sample with the engine, judge with the scorer, keep every token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.data.episode import Episode
from perilune.engine.backend import SamplingBackend
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments.protocol import Failure, Outcome, Task, Transcript
from perilune.models.tokenizer import Tokenizer
from perilune.tasks.as_sampled import check_group
from perilune.verifiers import Scorer
from perilune.watchdog import STALL, Waiting

if TYPE_CHECKING:
    from perilune.tasks.learned_reward import LearnedReward

Groups = list[tuple[Episode, ...]]


@dataclass(slots=True)
class Stopwatch:
    """Seconds spent in each part of a loop, and the tokens sampled in it."""

    sampling: float = 0.0
    scoring: float = 0.0
    learning: float = 0.0
    process: float = 0.0
    tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    _processor_began: float = field(default_factory=time.process_time)
    _learning_since: float = 0.0

    def start_learning(self) -> None:
        """Learning begins."""
        self._learning_since = time.perf_counter()

    def stop_learning(self) -> None:
        """Learning has ended for this step."""
        self.learning += time.perf_counter() - self._learning_since

    @property
    def elapsed(self) -> float:
        """Wall seconds since the start."""
        return time.perf_counter() - self.started

    def figures(self) -> dict[str, float]:
        """The line for `Workspace.timing`: where the seconds went, and sampled tokens a second.

        `processor` is what this process had of its processors, which other load on the machine does not
        change: the figure to compare arms of an experiment by. Judging is in a process of its own.
        `process`, where there is any, is the part of `other` that process rewards took.
        """
        busy = self.sampling + self.scoring + self.learning
        return {
            "sampling": self.sampling,
            "scoring": self.scoring,
            "learning": self.learning,
            "other": max(self.elapsed - busy, 0.0),
            **({"process": self.process} if self.process else {}),
            "processor": time.process_time() - self._processor_began,
            "tokens_per_second": self.tokens / self.sampling if self.sampling else 0.0,
        }


@dataclass(frozen=True)
class Rollouts:
    """Plays tasks: one group of `samples` episodes a task.

    The random numbers of a sample are keyed by (seed, step, task's place in the step, sample, position), so
    an episode does not depend on what else is in the batch.
    """

    engine: SamplingBackend
    tokenizer: Tokenizer
    scorer: Scorer
    environment: str
    seed: int
    learned: LearnedReward | None = None

    def play(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        params: SamplingParams,
        step: int,
        watch: Stopwatch,
        first: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Groups:
        """Sample and score; groups come in the order of `tasks`, whose place in the step is from `first`."""
        begun = time.perf_counter()
        prompts = [
            Prompt(self.tokenizer.encode_prompt(task.prompt), (self.seed, step, index))
            for index, task in enumerate(tasks, first)
        ]
        with Waiting("sampling") as wait:

            def progress(finished: int, total: int) -> None:
                wait.progress()
                if on_progress is not None:
                    on_progress(finished, total)

            completions = self.engine.sample(prompts, samples, params, progress)
        watch.sampling += time.perf_counter() - begun
        watch.tokens += sum(len(one.token_ids) for group in completions for one in group)

        begun = time.perf_counter()
        texts = [[self._text(one) for one in group] for group in completions]
        transcripts = [
            (task, Transcript(text, finished=one.finish_reason == "stop"))
            for task, group, row in zip(tasks, completions, texts, strict=True)
            for one, text in zip(group, row, strict=True)
        ]
        with Waiting("scoring", STALL + 2 * len(transcripts) * self.scorer.item_seconds):
            outcomes = self.scorer.score(transcripts)
        judged = [outcomes[i * samples : (i + 1) * samples] for i in range(len(tasks))]
        groups = [
            tuple(
                self._episode(task, prompt, one, text, outcome, f"{step}/{index}/{sample}")
                for sample, (one, text, outcome) in enumerate(zip(group, row, verdicts, strict=True))
            )
            for index, (task, prompt, group, row, verdicts) in enumerate(
                zip(tasks, prompts, completions, texts, judged, strict=True), first
            )
        ]
        for group, sampled, verdicts in zip(groups, completions, judged, strict=True):
            check_group(group, sampled, verdicts)
        if self.learned is not None:
            groups = self.learned.rescore(groups)
        watch.scoring += time.perf_counter() - begun
        return groups

    def _text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.token_ids.tolist())

    def _episode(  # noqa: PLR0917
        self,
        task: Task,
        prompt: Prompt,
        completion: Completion,
        text: str,
        outcome: Outcome,
        episode_id: str,
    ) -> Episode:
        return Episode(
            episode_id=episode_id,
            group_id=episode_id.rpartition("/")[0],
            task_id=task.task_id,
            environment=self.environment,
            seed=self.seed,
            messages=(*task.prompt, {"role": "assistant", "content": text}),
            prompt_ids=np.asarray(prompt.token_ids, dtype=np.int32),
            token_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), dtype=np.bool_),
            logprobs=completion.logprobs,
            policy_version=completion.policy_version,
            finish_reason=completion.finish_reason,
            metrics=_metrics(task, outcome),
            **_verdict(outcome),
        )


def _verdict(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"failure": f"{outcome.boundary}: {outcome.reason}"}
    return {"reward": outcome.reward, "reward_terms": dict(outcome.terms)}


def _metrics(task: Task, outcome: Outcome) -> dict[str, float]:
    figures = {} if isinstance(outcome, Failure) else dict(outcome.metrics)
    if task.difficulty is not None:
        figures["difficulty"] = float(task.difficulty)
    return figures
