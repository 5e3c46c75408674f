"""The rollout worker: from tasks to scored episodes, with every sampled token kept."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from perilune.data.episode import Episode, outcome_fields, outcome_metrics
from perilune.data.spans import Span, critical_steps, total_steps
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
from perilune.rollout.rollout import DueTurn, Part, Rollout, SampledTurn, Trajectory
from perilune.rollout.sub_agents import SubAgents
from perilune.rollout.timing import Stopwatch
from perilune.verifiers import Scorer
from perilune.verifiers.sessions import RemoteSession, Sessions
from perilune.watchdog import STALL_SECONDS, Watchdog

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
    sub_agents: SubAgents = field(default_factory=SubAgents)

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
            for group in self.groups_of(rollouts[start : start + samples], params)
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
                self._play_round(sessions, due, params, samples=samples, watch=watch, on_progress=on_progress)
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

    def _play_round(
        self,
        sessions: Sessions,
        due: Sequence[Rollout],
        params: SamplingParams,
        *,
        samples: int,
        watch: Stopwatch,
        on_progress: Progress | None,
    ) -> None:
        """Sample the turns that are due in the rollouts, and let the environment take them."""
        began = time.perf_counter()
        with Watchdog("sampling") as wait:

            def progress(finished: int, total: int) -> None:
                wait.progress()
                if on_progress is not None and len(due) == total and due[0].is_single_turn:
                    on_progress(finished, total)

            turns = [turn for one in due for turn in one.due if not turn.trajectory.is_refused]
            contexts = [turn.trajectory.context() for turn in turns]
            completions = self.sample_turns(turns, contexts, samples, params, progress)
        watch.sampling += time.perf_counter() - began
        watch.tokens += sum(len(one.token_ids) for one in completions)

        began = time.perf_counter()
        texts = map(self.text, completions)
        sampled = dict(zip(turns, map(SampledTurn, contexts, completions, texts), strict=True))
        actions = {rollout: rollout.take(sampled) for rollout in due}
        going = [rollout for rollout in due if not rollout.is_over]
        with self._scoring(sum(len(actions[rollout]) for rollout in going)):
            sessions.step([(one.session, actions[one], one.has_finished) for one in going])
            for rollout in going:
                check_scored_text(rollout, actions[rollout])
                rollout.advance()
            self.observe([one for one in going if not one.is_over], params)
        watch.scoring += time.perf_counter() - began

    def sample_turns(
        self,
        turns: Sequence[DueTurn],
        contexts: Sequence[list[int]],
        samples: int,
        params: SamplingParams,
        progress: Progress,
    ) -> list[Completion]:
        """Sample each turn with the engine of its agent. The first turns of a group share a prompt."""
        sampled: dict[DueTurn, Completion] = {}
        batches: dict[tuple[int, bool, int, tuple[str, ...]], list[tuple[DueTurn, list[int]]]] = {}
        for turn, context in zip(turns, contexts, strict=True):
            own = self.params_of(turn, params)
            key = self._engine_number(turn), turn.is_first, own.max_tokens, own.stop
            batches.setdefault(key, []).append((turn, context))
        for (number, is_first, _, _), pairs in sorted(batches.items(), key=lambda batch: batch[0]):
            engine, own = self._engines[number], self.params_of(pairs[0][0], params)
            if is_first:
                first = {turn.rollout.key: Prompt(context, turn.rollout.key) for turn, context in pairs}
                groups = engine.sample(list(first.values()), samples, own, progress)
                by_key = dict(zip(first, groups, strict=True))
                sampled |= {turn: by_key[turn.rollout.key][turn.rollout.sample] for turn, _ in pairs}
            else:
                prompts = [Prompt(context, turn.key) for turn, context in pairs]
                groups = engine.sample(prompts, 1, own, progress)
                sampled |= {turn: one for (turn, _), (one,) in zip(pairs, groups, strict=True)}
        return [sampled[turn] for turn in turns]

    @property
    def _engines(self) -> Sequence[SamplingBackend]:
        """The engines of the policy, of the opponents, and of frozen sub-agents."""
        return (
            self.engine,
            self.opponents.engine if self.opponents else self.engine,
            self.sub_agents.engine or self.engine,
        )

    def _engine_number(self, turn: DueTurn) -> int:
        if turn.rollout.is_opponents_turn:
            return 1
        return 2 if turn.agent and self.sub_agents.engine else 0

    def observe(self, rollouts: Sequence[Rollout], params: SamplingParams) -> None:
        """Append new messages for the agents to move; truncate rollouts without room for another turn."""
        encoded: dict[tuple[tuple[str, str], ...], list[int]] = {}
        prompts: dict[tuple[int, int, int], list[int]] = {}
        for rollout in rollouts:
            for turn in () if rollout.is_over else rollout.due:
                if turn.agent:
                    self._observe_agent(turn, params)
                    continue
                trajectory = turn.trajectory
                if trajectory.prompt_ids:
                    try:
                        trajectory.add_observation(self.tokenizer, turn.messages)
                    except RequestError as error:  # the tokenizer cannot encode the environment's text
                        rollout.fail("environment", error.what)
                else:
                    opening = (*rollout.task.prompt, *turn.messages)
                    text = tuple((message["role"], message["content"]) for message in opening)
                    if text not in encoded:
                        encoded[text] = self.tokenizer.encode_prompt(opening)
                    trajectory.begin(opening, encoded[text])
                    prompt = trajectory.prompt_ids
                    if not prompt:
                        rollout.fail("environment", "the prompt has no tokens")
                    elif turn.is_first and prompts.setdefault(rollout.key, prompt) != prompt:
                        rollout.fail("environment", "the same task and seed began differently")
                if rollout.actions and not rollout.is_over and not self._has_room(turn, params):
                    rollout.truncate()

    def _observe_agent(self, turn: DueTurn, params: SamplingParams) -> None:
        """Append new messages for a sub-agent. Its prompt may be the policy's text, so it may be refused."""
        trajectory = turn.trajectory
        if trajectory.is_refused:
            return
        try:
            if trajectory.prompt_ids:
                trajectory.add_observation(self.tokenizer, turn.messages)
            else:
                trajectory.begin(turn.messages, self.tokenizer.encode_prompt(turn.messages))
        except RequestError:
            trajectory.is_refused = True
            return
        fits = bool(trajectory.prompt_ids) and self._fits(trajectory, self.params_of(turn, params))
        trajectory.is_refused = not fits

    def params_of(self, turn: DueTurn, params: SamplingParams) -> SamplingParams:
        """The parameters of a turn."""
        make = self._agent_params if turn.agent else self.with_stop
        own = make(params, turn.rollout.task)
        if turn.max_tokens is None or turn.max_tokens >= own.max_tokens:
            return own
        return replace(own, max_tokens=turn.max_tokens, min_tokens=min(own.min_tokens, turn.max_tokens))

    def _agent_params(self, params: SamplingParams, task: Task) -> SamplingParams:
        """The parameters of sub-agents. The environment's stop texts end their turns if it says so."""
        stops = getattr(part_of(self.environment, task), "stops_agents", False)
        return self.with_stop(params, task) if stops else params

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

    def _has_room(self, turn: DueTurn, params: SamplingParams) -> bool:
        tokens = len(turn.trajectory.token_ids) + params.max_tokens
        return (
            tokens <= self.most_tokens(turn.rollout.task, params)
            and turn.rollout.own_turns < (self.scorer.settings.max_turns or math.inf)
            and self._fits(turn.trajectory, params)
        )

    def _fits(self, trajectory: Trajectory, params: SamplingParams) -> bool:
        """Whether the model has positions for another turn."""
        positions = self.engine.positions
        tokens = len(trajectory.prompt_ids) + len(trajectory.token_ids) + params.max_tokens
        return positions is None or tokens <= positions

    def _scoring(self, moves: int) -> Watchdog:
        return Watchdog("scoring", STALL_SECONDS + 2 * moves * self.scorer.item_seconds)

    def text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.token_ids.tolist())

    def groups_of(self, rollouts: Sequence[Rollout], params: SamplingParams) -> Groups:
        """The groups of the rollouts of one task: one for each player, and one for its trained sub-agents.

        Rollouts in which a player never moved are left out, but for failures. Failures are recorded once, for
        the first of the policy's players. A sub-agent has the reward of its player.
        """
        groups = []
        for player in rollouts[0].own_players:
            moved = [
                Part(one, player)
                for one in rollouts
                if one.trajectories[player].turns or (one.failure and player == one.own_players[0])
            ]
            groups.append(self._group(moved, self.with_stop(params, rollouts[0].task)))
            if self.sub_agents.trained:
                parts = [
                    Part(one, player, agent)
                    for one in rollouts
                    for agent, trajectory in one.sub_agents(player).items()
                    if trajectory.has_sampled and not one.failure
                ]
                groups.append(self._group(parts, self._agent_params(params, rollouts[0].task)))
        return [group for group in groups if group]

    def _group(self, parts: Sequence[Part], params: SamplingParams) -> tuple[Episode, ...]:
        group = tuple(map(self._episode, parts))
        check_group(group, parts, params if isinstance(self.engine, Engine) else None)
        return group

    def _episode(self, part: Part) -> Episode:
        rollout, trajectory, outcome = part.rollout, part.trajectory, part.outcome
        spans = part.spans
        last = trajectory.turns[-1].completion.finish_reason if part.agent else rollout.finish_reason
        return Episode(
            episode_id=part.episode_id,
            group_id=part.group_id,
            task_id=rollout.task.task_id,
            environment=environment_name(self.environment, rollout.task),
            seed=self.seed,
            messages=tuple(trajectory.messages or rollout.task.prompt),
            prompt_ids=np.asarray(trajectory.prompt_ids, dtype=np.int32),
            token_ids=np.asarray(trajectory.token_ids, dtype=np.int32),
            loss_mask=trajectory.mask(),
            logprobs=trajectory.sampled("logprobs", 0.0, np.float32),
            policy_version=trajectory.sampled("policy_version", -1, np.int32),
            finish_reason=last,
            metrics=_metrics(part, outcome, spans),
            routed_experts=trajectory.routes(),
            spans=spans,
            **trajectory.likeliest(),
            **outcome_fields(outcome),
        )


def _metrics(part: Part, outcome: Outcome, spans: Sequence[Span]) -> dict[str, float]:
    rollout = part.rollout
    figures = outcome_metrics(outcome)
    if not rollout.is_single_turn:
        figures["turns"] = float(len(part.trajectory.turns))
    if rollout.task.difficulty is not None:
        figures["difficulty"] = float(rollout.task.difficulty)
    if spans:
        figures["sub_agents"] = float(len(spans) - 1)
        figures["critical_steps"] = float(critical_steps(spans))
        figures["total_steps"] = float(total_steps(spans))
        figures["sub_agent_tokens"] = float(sum(span.tokens + span.prompt_tokens for span in spans[1:]))
    return figures


def session_seed(key: tuple[int, int, int]) -> int:
    """Seed (48 bits) of the sessions that play the task at (seed, step, index in the step)."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:6], "big")
