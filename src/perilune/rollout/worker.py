"""The rollout worker: turns tasks into scored episodes, and keeps every sampled token."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from perilune.data.episode import Episode, outcome_fields, outcome_metrics
from perilune.data.spans import Span, critical_steps, total_steps
from perilune.engine.backend import SamplingBackend
from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments.core.mixture import environment_name, find_part
from perilune.environments.core.prompting import PROMPTING_KEY, PromptingSettings
from perilune.environments.core.protocol import Environment, Outcome, Task
from perilune.environments.core.reference_answer import expected_answer
from perilune.errors import RequestError
from perilune.learn.distributed import SINGLE_RANK, Ranks
from perilune.models.text.template_facts import template_facts
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.checks import check_group, check_scored_text
from perilune.rollout.failures import check_failure_limit
from perilune.rollout.groups import Groups, flatten, gather_groups
from perilune.rollout.learned_reward import LearnedReward
from perilune.rollout.limits import max_episode_tokens
from perilune.rollout.opponents import Opponents
from perilune.rollout.rollout import AgentRollout, DueTurn, Rollout, SampledTurn, Trajectory
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
    learned_reward: LearnedReward | None = None
    ranks: Ranks = SINGLE_RANK
    opponents: Opponents | None = None
    sub_agents: SubAgents = field(default_factory=SubAgents)

    def __post_init__(self) -> None:
        for environment in (self.environment, *getattr(self.environment, "parts", {}).values()):
            self._check_system_prompt(getattr(environment, PROMPTING_KEY, None))

    def _check_system_prompt(self, settings: Any) -> None:
        if not isinstance(settings, PromptingSettings) or not settings.system or settings.system_as == "user":
            return
        if (use := template_facts(self.tokenizer).system) in ("refused", "ignored"):
            verb = {"refused": "refuses", "ignored": "ignores"}[use]
            raise RequestError(
                f"the model's chat template {verb} a system prompt",
                where=f"environment.{PROMPTING_KEY}.system",
                remedy=f"set {PROMPTING_KEY}.system_as: user, which puts it before the first question",
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
        """Sample and score the tasks; return the groups of all processes, in the order of `tasks`.

        The environment's stop texts also end an answer.

        Args:
            first: index of the first task within the step.
            on_progress: called with the numbers of finished and of all episodes of this process.

        Raises:
            WorkFailedError: when sampling fails, or more episodes fail than the recipe allows.
        """
        if self.opponents is not None:
            self.opponents.prepare(step)
        indices = self.ranks.shard(range(first, first + len(tasks)))
        tasks = self.ranks.shard(tasks)
        with watch.measure("scoring"), self._scoring_watchdog(len(tasks) * samples):
            sessions = Sessions(self.scorer.processes, self.environment)
            rollouts = self._begin(sessions, tasks, samples, step, indices)
        self.play_to_end(sessions, rollouts, params, samples=samples, watch=watch, on_progress=on_progress)
        with watch.measure("scoring"):
            groups = [
                group
                for start in range(0, len(rollouts), samples)
                for group in self.build_groups(rollouts[start : start + samples], params)
            ]
            if self.learned_reward is not None:
                groups = self.learned_reward.rescore(groups)
        groups = gather_groups(groups, self.ranks, watch)
        check_failure_limit(flatten(groups), self.scorer.settings, f"step {step}")
        return groups

    def play_to_end(
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
            samples: number of rollouts of each task.
        """
        try:
            with watch.measure("scoring"), self._scoring_watchdog(len(rollouts)):
                self.observe(rollouts, params)
            while due := [rollout for rollout in rollouts if not rollout.is_over]:
                self._play_round(sessions, due, params, samples=samples, watch=watch, on_progress=on_progress)
                if on_progress is not None:
                    on_progress(sum(rollout.is_over for rollout in rollouts), len(rollouts))
        finally:
            sessions.close([rollout.session for rollout in rollouts])

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
        for rollout in rollouts:
            rollout.advance()
        return rollouts

    def new_rollout(self, key: tuple[int, int, int], sample: int, session: RemoteSession) -> Rollout:
        players = getattr(self.environment, "players", 1)
        opponents = frozenset(self.opponents.opponent_players(key, players) if self.opponents else ())
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
        """Sample the due turns of the rollouts, and pass them to the environment."""
        with watch.measure("sampling"), Watchdog("sampling") as wait:

            def progress(finished: int, total: int) -> None:
                wait.progress()
                if on_progress is not None and len(due) == total and due[0].is_single_turn:
                    on_progress(finished, total)

            turns = [turn for rollout in due for turn in rollout.due if not turn.trajectory.is_refused]
            contexts = [turn.trajectory.context() for turn in turns]
            completions = self.sample_turns(turns, contexts, samples, params, progress)
        watch.tokens += sum(len(completion.token_ids) for completion in completions)

        with watch.measure("scoring"):
            texts = map(self.text, completions)
            sampled = dict(zip(turns, map(SampledTurn, contexts, completions, texts), strict=True))
            actions = {rollout: rollout.take(sampled) for rollout in due}
            active = [rollout for rollout in due if not rollout.is_over]
            with self._scoring_watchdog(sum(len(actions[rollout]) for rollout in active)):
                sessions.step(
                    [(rollout.session, actions[rollout], rollout.has_finished_turn) for rollout in active]
                )
                for rollout in active:
                    check_scored_text(rollout, actions[rollout])
                    rollout.advance()
                self.observe([rollout for rollout in active if not rollout.is_over], params)

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
            own_params = self.turn_params(turn, params)
            key = self._engine_number(turn), turn.is_first, own_params.max_tokens, own_params.stop
            batches.setdefault(key, []).append((turn, context))
        for (number, is_first, _, _), pairs in sorted(batches.items(), key=lambda batch: batch[0]):
            engine, own_params = self._engines[number], self.turn_params(pairs[0][0], params)
            if is_first:
                first = {turn.rollout.key: Prompt(context, turn.rollout.key) for turn, context in pairs}
                groups = engine.sample(list(first.values()), samples, own_params, progress)
                by_key = dict(zip(first, groups, strict=True))
                sampled |= {turn: by_key[turn.rollout.key][turn.rollout.sample] for turn, _ in pairs}
            else:
                prompts = [Prompt(context, turn.key) for turn, context in pairs]
                groups = engine.sample(prompts, 1, own_params, progress)
                sampled |= {turn: completion for (turn, _), (completion,) in zip(pairs, groups, strict=True)}
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
        """Append new messages for the due agents; truncate rollouts without room for another turn."""
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
                if rollout.actions and not rollout.is_over and not self._has_room_for_turn(turn, params):
                    rollout.truncate()

    def _observe_agent(self, turn: DueTurn, params: SamplingParams) -> None:
        """Append new messages for a sub-agent; refuse it if they cannot be encoded or do not fit.

        If the player itself has no room or no turn left in a later context, the episode is truncated.
        """
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
        fits = bool(trajectory.prompt_ids) and self._fits_context(trajectory, self.turn_params(turn, params))
        can_continue = fits and (self._has_turn_left(turn.rollout) or not turn.is_own)
        trajectory.is_refused = trajectory.is_full = not can_continue
        if trajectory.is_full and turn.is_own:
            turn.rollout.truncate()

    def turn_params(self, turn: DueTurn, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the stop texts and the token limit of the turn."""
        make = self.agent_params if turn.agent else self.add_stop_texts
        result = make(params, turn.rollout.task)
        if turn.max_tokens is None or turn.max_tokens >= result.max_tokens:
            return result
        return replace(result, max_tokens=turn.max_tokens, min_tokens=min(result.min_tokens, turn.max_tokens))

    def agent_params(self, params: SamplingParams, task: Task) -> SamplingParams:
        """Return the parameters of a sub-agent, with stop texts if the environment sets `stops_agents`."""
        stops = getattr(find_part(self.environment, task), "stops_agents", False)
        return self.add_stop_texts(params, task) if stops else params

    def add_stop_texts(self, params: SamplingParams, task: Task) -> SamplingParams:
        """Return the parameters with the stop texts of the task's environment."""
        stop = getattr(find_part(self.environment, task), "stop_texts", ())
        return replace(params, stop=(*params.stop, *stop)) if stop else params

    def is_multi_turn(self, task: Task) -> bool:
        """Return whether an episode of the task may have several turns."""
        return getattr(find_part(self.environment, task), "max_turns", 1) > 1

    def max_episode_tokens(self, task: Task, params: SamplingParams) -> int:
        """Return the most tokens of an episode of the task, after its prompt."""
        return max_episode_tokens(find_part(self.environment, task), self.scorer.settings, params.max_tokens)

    def _has_room_for_turn(self, turn: DueTurn, params: SamplingParams) -> bool:
        tokens = len(turn.trajectory.token_ids) + params.max_tokens
        return (
            tokens <= self.max_episode_tokens(turn.rollout.task, params)
            and self._has_turn_left(turn.rollout)
            and self._fits_context(turn.trajectory, params)
        )

    def _has_turn_left(self, rollout: Rollout) -> bool:
        """Return whether `episodes.max_turns` allows another turn of a player."""
        return rollout.player_turns < (self.scorer.settings.max_turns or math.inf)

    def _fits_context(self, trajectory: Trajectory, params: SamplingParams) -> bool:
        """Return whether the model has positions for another turn."""
        positions = self.engine.positions
        tokens = len(trajectory.prompt_ids) + len(trajectory.token_ids) + params.max_tokens
        return positions is None or tokens <= positions

    def _scoring_watchdog(self, moves: int) -> Watchdog:
        return Watchdog("scoring", STALL_SECONDS + 2 * moves * self.scorer.item_seconds)

    def text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.token_ids.tolist())

    def build_groups(self, rollouts: Sequence[Rollout], params: SamplingParams) -> Groups:
        """Build the groups of one task: one for each player, and one for its trained sub-agents.

        A player's group leaves out rollouts in which the player took no turn, but the group of the policy's
        first player has all failures. A sub-agent gets the reward of its player.
        """
        groups = []
        for player in rollouts[0].own_players:
            moved = [
                AgentRollout(rollout, player)
                for rollout in rollouts
                if rollout.trajectories[player].turns
                or (rollout.failure and player == rollout.own_players[0])
            ]
            groups.append(self._group(moved, self.add_stop_texts(params, rollouts[0].task)))
            if self.sub_agents.trained:
                parts = [
                    AgentRollout(rollout, player, agent)
                    for rollout in rollouts
                    for agent, trajectory in rollout.sub_agents(player).items()
                    if trajectory.has_sampled and not rollout.failure
                ]
                groups.append(self._group(parts, self.agent_params(params, rollouts[0].task)))
        return [group for group in groups if group]

    def _group(self, parts: Sequence[AgentRollout], params: SamplingParams) -> tuple[Episode, ...]:
        group = tuple(map(self._episode, parts))
        check_group(group, parts, params if isinstance(self.engine, Engine) else None)
        return group

    def _episode(self, part: AgentRollout) -> Episode:
        rollout, trajectory, outcome = part.rollout, part.trajectory, part.outcome
        spans = part.spans
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
            logprobs=trajectory.sampled_values("logprobs", 0.0, np.float32),
            policy_version=trajectory.sampled_values("policy_version", -1, np.int32),
            finish_reason=trajectory.finish_reason if part.agent else rollout.finish_reason,
            metrics=_episode_metrics(part, outcome, spans),
            routed_experts=trajectory.routes(),
            spans=spans,
            expected="" if part.agent else expected_answer(self.environment, rollout.task),
            **trajectory.top_tokens(),
            **outcome_fields(outcome),
        )


def _episode_metrics(part: AgentRollout, outcome: Outcome, spans: Sequence[Span]) -> dict[str, float]:
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
    """Return the seed (48 bits) of the sessions that play the task at (seed, step, index in the step)."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:6], "big")
