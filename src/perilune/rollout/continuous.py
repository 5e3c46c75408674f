"""Continuous rollouts: groups begin and end independently, and weights change between two tokens.

`RolloutWorker.play` waits for all episodes of a batch. Here a group starts as soon as it is admitted, each
turn is one request to the engine, and the environment's steps run in threads, so that a slow tool delays only
its own episode.

An episode is a function of its key and of the version that sampled each of its tokens. So an episode can be
resumed from its tokens, and repeated from the versions alone (`VersionRuns`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from torch import Tensor

from perilune.data.episode import FinishReason
from perilune.data.routes import Routes, routes_from_json, routes_to_json
from perilune.engine.engine import Engine
from perilune.engine.request import Completion, Delta, Request, SamplingParams
from perilune.environments.core.protocol import Task
from perilune.rollout.cache_admission import CacheAdmission
from perilune.rollout.checks import check_scored_text
from perilune.rollout.groups import Groups
from perilune.rollout.rollout import DueTurn, Rollout, SampledTurn
from perilune.rollout.worker import RolloutWorker, session_seed
from perilune.verifiers.process import EnvironmentProcess
from perilune.verifiers.sessions import Sessions

SCORING_BATCH_S = 0.05  # expected seconds of one scoring call

Event = Callable[[], None]
VersionRuns = list[tuple[int, int]]
"""The versions that sample an episode's tokens, each with its number of tokens, in order."""


@dataclass(slots=True, eq=False)
class TurnTokens:
    """The tokens of one turn so far.

    Attributes:
        finish_reason: None while the turn is being sampled.
        routed_experts: of a finished turn, if the engine records them.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    routed_experts: Routes | None = None

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.versions += versions

    def extended(self, more: Completion) -> TurnTokens:
        """Return a copy with the tokens of `more` appended."""
        copy = TurnTokens([*self.token_ids], [*self.logprobs], [*self.versions])
        copy.extend(more.token_ids.tolist(), more.logprobs.tolist(), more.policy_version.tolist())
        return copy

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            np.array(self.token_ids, dtype=np.int32),
            np.array(self.logprobs, dtype=np.float32),
            np.array(self.versions, dtype=np.int32),
            self.finish_reason,
            routed_experts=self.routed_experts,
        )

    def to_json(self) -> dict[str, Any]:
        routes = self.routed_experts
        tokens = {"token_ids": self.token_ids, "logprobs": self.logprobs, "versions": self.versions}
        return tokens | {
            "finish_reason": self.finish_reason,
            **({} if routes is None else {"routed_experts": routes_to_json(routes)}),
        }

    @classmethod
    def from_json(cls, turn: Mapping[str, Any]) -> TurnTokens:
        routes = turn.get("routed_experts")
        return cls(**{**turn, "routed_experts": None if routes is None else routes_from_json(routes)})


@dataclass(slots=True, eq=False)
class Group:
    """A group to play.

    Attributes:
        key: (step, index): its place in the order of admission.
        recorded: for each sample, the turns of an earlier attempt, from which the episode continues.
        version_runs: for each sample, the versions that must sample its tokens; None for the current ones.
        rollouts: the open episodes, by sample.
        finished_turns: their finished turns, by sample.
        finished_count: number of finished episodes.
    """

    key: tuple[int, int]
    task: Task
    recorded: list[list[TurnTokens]] | None = None
    version_runs: list[VersionRuns] | None = None
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    finished_turns: dict[int, list[TurnTokens]] = field(default_factory=dict)
    finished_count: int = 0

    def finished_version_runs(self, samples: int) -> list[VersionRuns]:
        """Return the version runs of each sample's finished turns."""
        versions = (
            [turn.versions for turn in self.finished_turns.get(sample, [])] for sample in range(samples)
        )
        return [
            [(version, sum(1 for _ in run)) for version, run in groupby(chain.from_iterable(turn_versions))]
            for turn_versions in versions
        ]

    def turns(self, sample: int, current: TurnTokens | None) -> list[TurnTokens]:
        """Return the turns of a sample so far, including `current`, or `recorded` while these are more."""
        turns = [*self.finished_turns.get(sample, []), *([current] if current else [])]
        before = self.recorded[sample] if self.recorded else []
        return turns if len(turns) >= len(before) else before


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn in progress: the tokens it continues, and those sampled so far."""

    group: Group
    due: DueTurn
    params: SamplingParams
    context: list[int]
    key: tuple[int, int, int]
    sample: int  # index of its random numbers
    tokens: TurnTokens

    @property
    def rollout(self) -> Rollout:
        return self.due.rollout


class ContinuousRollouts:
    """Plays groups with the engine of `worker`; groups do not wait for each other.

    Not thread-safe: other threads call `post`.

    Args:
        worker: must use an `Engine` and have no opponents.
        samples: number of episodes of each group.
        deliver: called with each finished group, and its episodes by player.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        params: SamplingParams,
        samples: int,
        deliver: Callable[[Group, Groups], None],
    ) -> None:
        assert isinstance(worker.engine, Engine) and worker.opponents is None
        self._worker, self._params, self._samples, self._deliver = worker, params, samples, deliver
        self._engine: Engine = worker.engine
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._groups: dict[tuple[int, int], Group] = {}
        self._waiting: deque[Group] = deque()  # admitted groups that have not begun
        self._admission = CacheAdmission(self._engine.cache_tokens)
        self._turns: dict[int, dict[int, _Turn]] = {}  # by engine request, then sample
        self._paused: list[_Turn] = []  # turns that wait for the next weights
        self._threads = [_EnvironmentThread(proc, worker, self.post) for proc in worker.scorer.processes]

    def post(self, event: Event) -> None:
        """Queue `event` for the next `advance`. Any thread may call this."""
        self._events.put(event)

    @property
    def is_idle(self) -> bool:
        """True if nothing can happen until new weights or a new group arrive."""
        waiting = len(self._paused) + sum(group.finished_count for group in self._groups.values())
        return waiting == self._samples * len(self._groups) and self._events.empty()

    def advance(self) -> None:
        """Handle all events, then sample one step. Waits for an event when there is nothing to sample."""
        try:
            self._events.get(block=not self._engine.unfinished)()
            while True:
                self._events.get(block=False)()
        except Empty:
            pass
        if self._engine.unfinished:
            for delta in self._engine.step():
                self._on_delta(delta)

    def admit(self, group: Group) -> None:
        """Play a group as soon as the cache has room for it."""
        self._groups[group.key] = group
        self._waiting.append(group)
        self._begin_groups()

    def _begin_groups(self) -> None:
        """Open the sessions of the next groups. A group's sampling begins when all its sessions are open.

        Single-turn groups and groups with `version_runs` do not wait for room in the cache.
        """
        while self._waiting:
            group = self._waiting[0]
            if group.version_runs is None and self._worker.is_multi_turn(group.task):
                max_tokens = self._samples * self._worker.max_episode_tokens(group.task, self._params)
                if not self._admission.has_room(max_tokens):
                    return
                self._admission.begin(group.key, group.rollouts)
            self._waiting.popleft()
            for sample in range(self._samples):
                thread = min(self._threads, key=lambda thread: thread.sessions)
                thread.open(group, sample, partial(self._on_session_open, group))

    def update_weights(self, state: Mapping[str, Tensor] | None, version: int) -> None:
        """Load `state`, or the decoder's current weights, and resume the turns that waited for them."""
        self._engine.update_weights(state, version)
        resumed, self._paused = self._paused, []
        for turn in resumed:
            self._request_tokens(turn)

    def recorded(self) -> dict[tuple[int, int], list[list[TurnTokens]]]:
        """Return the turns sampled so far: for each group in flight, by key, the turns of each sample."""
        current = {(turn.group.key, turn.rollout.sample): turn.tokens for turn in self._paused}
        for request, turns in self._turns.items():
            for index, completion in self._engine.sampled_so_far(request).items():
                turn = turns[index]
                current[turn.group.key, turn.rollout.sample] = turn.tokens.extended(completion)
        return {
            key: [group.turns(sample, current.get((key, sample))) for sample in range(self._samples)]
            for key, group in self._groups.items()
        }

    # -- a rollout ---------------------------------------------------------------------------------------

    def _on_session_open(self, group: Group, sample: int, rollout: Rollout) -> None:
        rollout.advance()
        group.rollouts[sample] = rollout
        if len(group.rollouts) < self._samples:
            return
        rollouts = [group.rollouts[sample] for sample in range(self._samples)]
        self._observe(rollouts)
        if group.recorded or group.version_runs or any(rollout.is_over for rollout in rollouts):
            for member in rollouts:
                self._advance_turn(group, member)
            return
        turns = [self._make_turn(group, rollout) for rollout in rollouts]
        self._submit(turns, turns[0].params, samples=self._samples)

    def _observe(self, rollouts: Sequence[Rollout]) -> None:
        """Append the agents' new messages; fail episodes with sub-agents."""
        self._worker.observe(rollouts, self._params)
        for rollout in rollouts:
            if not rollout.is_over and any(turn.agent for turn in rollout.due):
                rollout.fail("environment", "asynchronous training cannot sample sub-agents yet")

    def _advance_turn(self, group: Group, rollout: Rollout) -> None:
        """Sample the next turn of a rollout, or end it."""
        if rollout.is_over:
            self._finish_rollout(group, rollout)
            return
        turn = self._make_turn(group, rollout)
        recorded = group.recorded[rollout.sample] if group.recorded else []
        if (number := len(rollout.actions)) < len(recorded):
            turn.tokens = recorded[number]
        if turn.tokens.finish_reason is None:
            self._request_tokens(turn)
        else:
            self._finish_turn(turn)

    def _make_turn(self, group: Group, rollout: Rollout) -> _Turn:
        (due,) = rollout.due
        key, sample = (rollout.key, rollout.sample) if due.is_first else (due.key, 0)
        params = self._worker.turn_params(due, self._params)
        return _Turn(group, due, params, due.trajectory.context(), key, sample, TurnTokens())

    def _request_tokens(self, turn: _Turn) -> None:
        """Request the rest of a turn from the engine, up to the tokens that this version may sample."""
        params, count = turn.params, len(turn.tokens.token_ids)
        max_tokens = min(params.max_tokens - count, self._tokens_allowed(turn))
        if max_tokens <= 0:
            self._paused.append(turn)
            return
        min_tokens = min(max(params.min_tokens - count, 0), max_tokens)
        self._submit([turn], replace(params, max_tokens=max_tokens, min_tokens=min_tokens), samples=1)

    def _submit(self, turns: list[_Turn], params: SamplingParams, *, samples: int) -> None:
        first = turns[0]
        sampled = first.tokens.token_ids
        request = Request(
            first.context + sampled,
            params,
            first.key,
            samples,
            position=len(sampled),
            first_sample=first.sample,
        )
        self._turns[self._engine.add(request, stream=False)] = dict(enumerate(turns))

    def _tokens_allowed(self, turn: _Turn) -> int:
        """Return the number of tokens that the current version may sample next in the turn's episode."""
        if turn.group.version_runs is None:
            return turn.params.max_tokens
        sample = turn.rollout.sample
        earlier = sum(len(previous.token_ids) for previous in turn.group.finished_turns.get(sample, []))
        position = earlier + len(turn.tokens.token_ids)
        for version, count in turn.group.version_runs[sample]:
            if position < count:
                return count - position if version == self._engine.version else 0
            position -= count
        return 0

    def _on_delta(self, delta: Delta) -> None:
        if delta.failure is not None:
            raise delta.failure
        turn = self._turns[delta.request_id].pop(delta.sample)
        turn.tokens.extend(delta.token_ids, delta.logprobs, delta.policy_version)
        if not self._turns[delta.request_id]:
            del self._turns[delta.request_id]
        if delta.finish_reason == "length" and len(turn.tokens.token_ids) < turn.params.max_tokens:
            self._request_tokens(turn)
            return
        turn.tokens.finish_reason = delta.finish_reason
        turn.tokens.routed_experts = delta.routed_experts
        self._finish_turn(turn)

    def _finish_turn(self, turn: _Turn) -> None:
        rollout, completion = turn.rollout, turn.tokens.completion()
        text = self._worker.text(completion)
        turn.group.finished_turns.setdefault(rollout.sample, []).append(turn.tokens)
        actions = rollout.take({turn.due: SampledTurn(turn.context, completion, text)})
        if rollout.is_over:
            self._finish_rollout(turn.group, rollout)
            return

        def stepped() -> None:
            check_scored_text(rollout, actions)
            rollout.advance()
            if not rollout.is_over:
                self._observe([rollout])
            self._advance_turn(turn.group, rollout)

        self._thread_of(rollout).step(rollout, actions, stepped)

    def _thread_of(self, rollout: Rollout) -> _EnvironmentThread:
        return next(thread for thread in self._threads if thread.process is rollout.session.process)

    def _finish_rollout(self, group: Group, rollout: Rollout) -> None:
        self._thread_of(rollout).close(rollout)
        group.finished_count += 1
        if group.finished_count < self._samples:
            return
        del self._groups[group.key]
        self._admission.end(group.key)
        self._begin_groups()
        rollouts = [group.rollouts[sample] for sample in range(self._samples)]
        self._deliver(group, self._worker.build_groups(rollouts, self._params))


class _EnvironmentThread:
    """A thread that calls one environment process and posts an event after each call.

    Waiting answers of single-turn sessions are scored in batches of about `SCORING_BATCH_S` seconds. Steps of
    multi-turn sessions may wait for tools, so each is a separate call.
    """

    def __init__(
        self, process: EnvironmentProcess, worker: RolloutWorker, post: Callable[[Event], None]
    ) -> None:
        self.process, self._worker, self._post = process, worker, post
        self.sessions = 0
        self._sessions = Sessions([process], worker.environment)
        self._work: SimpleQueue[_Step | Event] = SimpleQueue()
        self._seconds = SCORING_BATCH_S  # per answer, in the last scoring call
        Thread(target=self._run, name="environment", daemon=True).start()

    def open(self, group: Group, sample: int, done: Callable[[int, Rollout], None]) -> None:
        """Open a session and pass a new rollout to `done`."""
        worker, (step, index) = self._worker, group.key
        key = (worker.seed, step, index)
        self.sessions += 1

        def work() -> None:
            (session,) = self._sessions.open([(group.task, session_seed(key))])
            rollout = worker.new_rollout(key, sample, session)
            self._post(lambda: done(sample, rollout))

        self._work.put(work)

    def step(self, rollout: Rollout, actions: list[str], done: Event) -> None:
        """Apply the actions of a round, then post `done`."""
        self._work.put(_Step(rollout, actions, done))

    def close(self, rollout: Rollout) -> None:
        self.sessions -= 1
        self._work.put(lambda: self._sessions.close([rollout.session]))

    def _run(self) -> None:
        while True:
            work = [self._work.get()]
            while not self._work.empty():
                work.append(self._work.get())
            try:
                self._process(work)
            except Exception as error:
                self._post(partial(raise_error, error))

    def _process(self, work: Sequence[_Step | Event]) -> None:
        answers = [item for item in work if isinstance(item, _Step) and not item.rollout.session.is_held]
        while answers:
            count = max(1, int(SCORING_BATCH_S / self._seconds))
            start = time.perf_counter()
            self._step(answers[:count])
            self._seconds = (time.perf_counter() - start) / len(answers[:count])
            del answers[:count]
        for item in work:
            if not isinstance(item, _Step):
                item()
            elif item.rollout.session.is_held:
                self._step([item])

    def _step(self, steps: Sequence[_Step]) -> None:
        self._sessions.step(
            [(step.rollout.session, step.actions, step.rollout.has_finished_turn) for step in steps]
        )
        for step in steps:
            self._post(step.done)


@dataclass(frozen=True, slots=True)
class _Step:
    rollout: Rollout
    actions: list[str]
    done: Event


def raise_error(error: Exception) -> None:
    raise error
