"""The rollout worker: from tasks to scored episodes, with every sampled token kept."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perilune.data.episode import Episode, outcome_fields, outcome_metrics
from perilune.engine.backend import SamplingBackend
from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments.core.mixture import environment_name, part_of
from perilune.environments.core.prompting import KEY, PromptingSettings
from perilune.environments.core.protocol import Environment, Outcome, Task
from perilune.errors import RequestError
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.models.text.template_facts import template_facts
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.checks import check_group, check_scored_text
from perilune.rollout.failures import require_few_failures
from perilune.rollout.groups import Groups, gather_groups
from perilune.rollout.learned_reward import LearnedReward
from perilune.rollout.limits import episode_tokens
from perilune.rollout.opponents import Opponents
from perilune.rollout.rollout import Rollout, Trajectory
from perilune.rollout.timing import Stopwatch
from perilune.verifiers import Scorer
from perilune.verifiers.sessions import RemoteSession, Sessions
from perilune.watchdog import STALL, Waiting

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RolloutWorker:
    """Plays tasks and returns one group of `samples` episodes for each task and player.

    With several processes, each plays a share of the tasks and all receive all groups. Turns of `opponents`
    belong to no group.

    Episodes advance together: the engine samples all due turns in one batch, then the environment takes them.
    The random numbers of a turn are keyed by (seed, step, index of the task in the step, sample, turn), so an
    episode does not depend on the rest of the batch.
    """

    engine: SamplingBackend
    tokenizer: Tokenizer
    scorer: Scorer
    environment: Environment
    seed: int
    learned: LearnedReward | None = None
    ranks: Ranks = SINGLE_RANK
    opponents: Opponents | None = None

    def __post_init__(self) -> None:
        for environment in (self.environment, *getattr(self.environment, "parts", {}).values()):
            self._check_system_prompt(getattr(environment, KEY, None))

    def _check_system_prompt(self, settings: Any) -> None:
        if not isinstance(settings, PromptingSettings) or not settings.system or settings.system_as == "user":
            return
        if (use := template_facts(self.tokenizer).system) in ("refused", "ignored"):
            verb = {"refused": "refuses", "ignored": "ignores"}[use]
            raise RequestError(
                f"the model's chat template {verb} a system prompt",
                where=f"environment.{KEY}.system",
                remedy=f"set {KEY}.system_as: user, which puts it before the first question",
            )

    def play(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        params: SamplingParams,
        step: int,
        watch: Stopwatch,
        first: int = 0,
        on_progress: Progress | None = None,
    ) -> Groups:
        """Sample and score the tasks; return the groups in the order of `tasks`.

        The environment's stop texts also end an answer.

        Args:
            first: index in the step of the first task.
            on_progress: called with the numbers of finished and of all episodes.

        Raises:
            WorkFailedError: when sampling fails, or more episodes fail than the recipe allows.
        """
        if self.opponents is not None:
            self.opponents.prepare(step)
        indices = self.ranks.shard(range(first, first + len(tasks)))
        tasks = self.ranks.shard(tasks)
        began = time.perf_counter()
        sessions = Sessions(self.scorer.processes, self.environment)
        with self._scoring(len(tasks) * samples):
            rollouts = self._begin(sessions, tasks, samples, step, indices)
        watch.scoring += time.perf_counter() - began
        self.play_out(sessions, rollouts, params, samples=samples, watch=watch, on_progress=on_progress)
        began = time.perf_counter()
        groups = [
            group
            for start in range(0, len(rollouts), samples)
            for player in rollouts[start].own_players
            if (group := self.group(rollouts[start : start + samples], player, params))
        ]
        if self.learned is not None:
            groups = self.learned.rescore(groups)
        watch.scoring += time.perf_counter() - began
        groups = gather_groups(groups, self.ranks, watch)
        require_few_failures([one for group in groups for one in group], self.scorer.settings, f"step {step}")
        return groups

    def play_out(
        self,
        sessions: Sessions,
        rollouts: Sequence[Rollout],
        params: SamplingParams,
        *,
        samples: int,
        watch: Stopwatch,
        on_progress: Progress | None = None,
    ) -> None:
        """Play newly opened rollouts to their ends, and close their sessions.

        Args:
            samples: number of samples of each key among the rollouts.
        """
        try:
            began = time.perf_counter()
            with self._scoring(len(rollouts)):
                self.observe(rollouts, params)
            watch.scoring += time.perf_counter() - began
            while due := [one for one in rollouts if not one.is_over]:
                self._turn(sessions, due, params, samples=samples, watch=watch, on_progress=on_progress)
                if on_progress is not None:
                    on_progress(sum(one.is_over for one in rollouts), len(rollouts))
        finally:
            sessions.close([one.session for one in rollouts])

    def _begin(
        self, sessions: Sessions, tasks: Sequence[Task], samples: int, step: int, indices: Sequence[int]
    ) -> list[Rollout]:
        """Open a session for each rollout. All sessions of a group share one seed, and so one prompt."""
        keys = [(self.seed, step, index) for index in indices]
        opened = sessions.open(
            [(task, session_seed(key)) for task, key in zip(tasks, keys, strict=True) for _ in range(samples)]
        )
        rollouts = [
            self.new_rollout(keys[number // samples], number % samples, session)
            for number, session in enumerate(opened)
        ]
        for one in rollouts:
            one.advance()
        return rollouts

    def new_rollout(self, key: tuple[int, int, int], sample: int, session: RemoteSession) -> Rollout:
        """The rollout of a newly opened session."""
        players = getattr(self.environment, "players", 1)
        opponents = frozenset(self.opponents.players_of(key, players) if self.opponents else ())
        return Rollout(session.task, key, sample, session, players, opponents=opponents)

    def _turn(
        self,
        sessions: Sessions,
        due: Sequence[Rollout],
        params: SamplingParams,
        *,
        samples: int,
        watch: Stopwatch,
        on_progress: Progress | None,
    ) -> None:
        """Sample one turn in each of the rollouts, and let the environment take it."""
        began = time.perf_counter()
        with Waiting("sampling") as wait:

            def progress(finished: int, total: int) -> None:
                wait.progress()
                if on_progress is not None and len(due) == total and due[0].is_single_turn:
                    on_progress(finished, total)

            contexts = [one.trajectory.context() for one in due]
            completions = self.sample_turns(due, contexts, samples, params, progress)
        watch.sampling += time.perf_counter() - began
        watch.tokens += sum(len(one.token_ids) for one in completions)

        began = time.perf_counter()
        moves = []
        for rollout, context, completion in zip(due, contexts, completions, strict=True):
            text = self.text(completion)
            rollout.add_completion(context, completion, text)
            if not rollout.is_over:
                moves.append((rollout.session, text, completion.finish_reason == "stop"))
        with self._scoring(len(moves)):
            sessions.step(moves)
            for rollout, completion in zip(due, completions, strict=True):
                if not rollout.is_over:
                    check_scored_text(rollout, self.text(completion))
                    rollout.advance()
            self.observe([one for one in due if not one.is_over], params)
        watch.scoring += time.perf_counter() - began

    def sample_turns(
        self,
        due: Sequence[Rollout],
        contexts: Sequence[list[int]],
        samples: int,
        params: SamplingParams,
        progress: Progress,
    ) -> list[Completion]:
        """The next turn of each rollout, sampled by the engine of the player to move."""
        sampled: dict[Rollout, Completion] = {}
        batches: dict[tuple[bool, tuple[str, ...]], list[tuple[Rollout, list[int]]]] = {}
        for rollout, context in zip(due, contexts, strict=True):
            key = rollout.is_opponents_turn, self._stop_texts(rollout.task)
            batches.setdefault(key, []).append((rollout, context))
        for (by_opponents, _), pairs in sorted(batches.items(), key=lambda batch: batch[0]):
            engine = self.opponents.engine if by_opponents and self.opponents else self.engine
            own = self.with_stop(params, pairs[0][0].task)
            if due[0].actions:
                prompts = [Prompt(context, rollout.turn_key) for rollout, context in pairs]
                groups = engine.sample(prompts, 1, own, progress)
                sampled |= {rollout: one for (rollout, _), (one,) in zip(pairs, groups, strict=True)}
            else:
                first = {rollout.key: Prompt(context, rollout.key) for rollout, context in pairs}
                groups = engine.sample(list(first.values()), samples, own, progress)
                by_key = dict(zip(first, groups, strict=True))
                sampled |= {rollout: by_key[rollout.key][rollout.sample] for rollout, _ in pairs}
        return [sampled[rollout] for rollout in due]

    def observe(self, rollouts: Sequence[Rollout], params: SamplingParams) -> None:
        """Append new messages for the players to move; truncate rollouts without room for another turn."""
        encoded: dict[tuple[tuple[str, str], ...], list[int]] = {}
        prompts: dict[tuple[int, int, int], list[int]] = {}
        for rollout in rollouts:
            if rollout.is_over:
                continue
            trajectory, new = rollout.trajectory, rollout.new_messages
            if trajectory.prompt_ids:
                try:
                    trajectory.add_observation(self.tokenizer, new)
                except RequestError as error:  # the tokenizer cannot encode the environment's text
                    rollout.fail("environment", error.what)
            else:
                opening = (*rollout.task.prompt, *new)
                text = tuple((message["role"], message["content"]) for message in opening)
                if text not in encoded:
                    encoded[text] = self.tokenizer.encode_prompt(opening)
                trajectory.begin(opening, encoded[text])
                prompt = trajectory.prompt_ids
                if not rollout.actions and prompts.setdefault(rollout.key, prompt) != prompt:
                    rollout.fail("environment", "the same task and seed began differently")
            if rollout.actions and not rollout.is_over and not self._has_room(rollout, params):
                rollout.truncate()

    def with_stop(self, params: SamplingParams, task: Task) -> SamplingParams:
        """The parameters with the stop texts of the task's environment."""
        stop = self._stop_texts(task)
        return replace(params, stop=(*params.stop, *stop)) if stop else params

    def _stop_texts(self, task: Task) -> tuple[str, ...]:
        return tuple(getattr(part_of(self.environment, task), "stop_texts", ()))

    def has_turns(self, task: Task) -> bool:
        """Whether an episode of the task may have several turns."""
        return getattr(part_of(self.environment, task), "max_turns", 1) > 1

    def most_tokens(self, task: Task, params: SamplingParams) -> int:
        """The most tokens of an episode of the task, after its prompt."""
        return episode_tokens(part_of(self.environment, task), self.scorer.settings, params.max_tokens)

    def _has_room(self, rollout: Rollout, params: SamplingParams) -> bool:
        settings, positions = self.scorer.settings, self.engine.positions
        tokens = len(rollout.trajectory.token_ids) + params.max_tokens
        return (
            tokens <= self.most_tokens(rollout.task, params)
            and len(rollout.actions) < (settings.max_turns or math.inf)
            and (positions is None or len(rollout.trajectory.prompt_ids) + tokens <= positions)
        )

    def _scoring(self, moves: int) -> Waiting:
        return Waiting("scoring", STALL + 2 * moves * self.scorer.item_seconds)

    def text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.token_ids.tolist())

    def group(self, rollouts: Sequence[Rollout], player: int, params: SamplingParams) -> tuple[Episode, ...]:
        """The player's episodes. Rollouts in which it never moved are left out, but for failures.

        Failures are recorded once, for the first of the policy's players.
        """
        moved = [
            one
            for one in rollouts
            if one.trajectories[player].turns or (one.failure and player == one.own_players[0])
        ]
        group = tuple(self._episode(one, player) for one in moved)
        own = self.with_stop(params, rollouts[0].task)
        check_group(group, moved, player, own if isinstance(self.engine, Engine) else None)
        return group

    def _episode(self, rollout: Rollout, player: int) -> Episode:
        trajectory, outcome = rollout.trajectories[player], rollout.outcome(player)
        _, step, index = rollout.key
        group_id = f"{step}/{index}/p{player}" if player else f"{step}/{index}"
        return Episode(
            episode_id=f"{group_id}/{rollout.sample}",
            group_id=group_id,
            task_id=rollout.task.task_id,
            environment=environment_name(self.environment, rollout.task),
            seed=self.seed,
            messages=tuple(trajectory.messages or rollout.task.prompt),
            prompt_ids=np.asarray(trajectory.prompt_ids, dtype=np.int32),
            token_ids=np.asarray(trajectory.token_ids, dtype=np.int32),
            loss_mask=trajectory.mask(),
            logprobs=trajectory.sampled("logprobs", 0.0, np.float32),
            policy_version=trajectory.sampled("policy_version", -1, np.int32),
            finish_reason=rollout.finish_reason,
            metrics=_metrics(rollout, trajectory, outcome),
            routed_experts=trajectory.routes(),
            **outcome_fields(outcome),
        )


def _metrics(rollout: Rollout, trajectory: Trajectory, outcome: Outcome) -> dict[str, float]:
    figures = outcome_metrics(outcome)
    if not rollout.is_single_turn:
        figures["turns"] = float(len(trajectory.turns))
    if rollout.task.difficulty is not None:
        figures["difficulty"] = float(rollout.task.difficulty)
    return figures


def session_seed(key: tuple[int, int, int]) -> int:
    """Seed (48 bits) of the sessions that play the task at (seed, step, index in the step)."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:6], "big")
