"""A discrete-event simulation of an asynchronous stage.

Rollout workers step their engines, environments answer after their latency, `admission_limit` limits the
admitted groups, and the learner trains on the finished groups that were admitted first. New weights arrive
between two steps of an engine.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from perilune.engine.request import Delta
from perilune.simulate.episodes import GroupShape, Tokens
from perilune.simulate.run import RunResult, Scenario, Simulation, SynchronousRun, process_name, turn_context
from perilune.tasks.rl.asynchronous.sampler import admission_limit


class AsynchronousRun(Simulation):
    """Workers sample while the learner trains."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        settings = self.plan.asynchronous
        assert settings is not None
        self._settings = settings
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap by time and order
        self._event_count = self._admitted = self._step = 0
        self._learning = self._waiting = self._done = False
        self._finished: dict[int, _Group] = {}
        self._source = self._group_shapes()
        self.now = self._step_began = 0.0
        count = settings.workers
        self.workers = [
            _Worker(self, number, process_name("worker", number, count), settings.environments)
            for number in range(count)
        ]

    def run(self) -> RunResult:
        """Simulate the stage and return its result."""
        begin = self.result.start = self.start_seconds()
        self.now = begin + self.evaluate(0, begin)
        for worker in self.workers:
            self.schedule(begin + self.times.start + self._environments_start(), worker.start)
        self._begin_step(1)
        while self._events and not self._done:
            self.now, _, action = heapq.heappop(self._events)
            action()
        for worker in self.workers:
            worker.end_span()
        self.result.seconds = self.now
        self.result.add_engine_counts([worker.engine for worker in self.workers])
        return self.result

    def _environments_start(self) -> float:
        """Return the seconds until all environment processes have started. `times.start` includes one."""
        processes = self._settings.environments
        return self.environment.start * (processes - 1) / (self.plan.cores or processes)

    def schedule(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at the time `when`."""
        self._event_count += 1
        heapq.heappush(self._events, (when, self._event_count, action))

    def slowdown(self) -> float:
        """Return the current factor of all times: above 1 when more processes compute than cores exist."""
        if self.plan.cores is None:
            return 1.0
        busy = self._learning + sum(worker.stepping for worker in self.workers)
        return max(1.0, busy / self.plan.cores)

    def add_finished_group(self, group: _Group) -> None:
        """Queue a finished group for training."""
        self._finished[group.number] = group
        self._train_if_ready()

    def _group_shapes(self) -> Iterator[GroupShape]:
        for step in range(1, self.plan.steps + 1):
            yield from self.lengths.groups(step, self.plan.prompts, self.plan.samples)

    def _begin_step(self, step: int) -> None:
        """Publish the weights before step `step`, admit groups, and train once enough groups are finished."""
        self._step, self._step_began, self._waiting = step, self.now, True
        # Workers handle messages in order, so new groups begin with these weights.
        arrival = self.now + self.times.publish
        for worker in self.workers:
            self.schedule(arrival, partial(worker.publish, step - 1))
        admit_limit = admission_limit(self._settings, self.plan.prompts, step - 1, self.plan.steps)
        while self._admitted < admit_limit:
            group = _Group(self._admitted, next(self._source))
            worker = min(self.workers, key=lambda worker: (worker.groups, worker.number))
            worker.groups += 1
            self.schedule(arrival, partial(worker.admit, group))
            self._admitted += 1
        self._train_if_ready()

    def _train_if_ready(self) -> None:
        """Train on the groups that were admitted first, if enough are finished."""
        plan = self.plan
        if not self._waiting or len(self._finished) < plan.prompts:
            return
        self._waiting = False
        chosen = [self._finished.pop(number) for number in sorted(self._finished)[: plan.prompts]]
        for version, count in sum((group.versions for group in chosen), Counter[int]()).items():
            self.result.ages[self._step - 1 - version] += count
        shapes = [group.shape for group in chosen]
        self.count_tokens(shapes)
        self._learning = True
        slow = self.slowdown()
        learning = slow * self.learning_seconds(shapes)
        other = slow * self.recording_seconds(shapes)
        self.result.add_span("learner", "learn", self.now, self.now + learning)
        self.result.add_span("learner", "record", self.now + learning, self.now + learning + other)
        line = {
            "step": self._step,
            "sampling": self.now - self._step_began,
            "learning": learning,
            "other": other,
        }
        self.result.steps.append(line | {"groups_ready": float(len(self._finished))})
        self.schedule(self.now + learning + other, self._end_step)

    def _end_step(self) -> None:
        """End a step: evaluate if it is due, and begin the next step or end the stage."""
        self._learning = False
        seconds = self.evaluate(self._step, self.now)
        self.result.steps[-1]["evaluation"] = seconds
        if self._step == self.plan.steps:
            self._done = True
            self.now += seconds
            return
        step = self._step + 1
        self.schedule(self.now + seconds, partial(self._begin_step, step))


@dataclass(slots=True, eq=False)
class _Group:
    """An admitted group.

    Attributes:
        versions: number of sampled tokens by the policy version that sampled them.
        lanes: the environment process of each episode.
        finished: number of finished episodes.
    """

    number: int
    shape: GroupShape
    versions: Counter[int] = field(default_factory=Counter)
    lanes: list[int] = field(default_factory=list)
    finished: int = 0


@dataclass(frozen=True, slots=True)
class _Request:
    """Turn number `turn` of some samples of a group."""

    group: _Group
    samples: Sequence[int]
    turn: int


class _Worker:
    """A rollout process: one engine, and environment processes that each handle one answer at a time.

    Messages that arrive during a step of the engine are handled after the step, as in
    `ContinuousRollouts.advance`.
    """

    def __init__(self, run: AsynchronousRun, number: int, name: str, environments: int) -> None:
        self.number, self.engine, self.groups = number, run.make_engine(), 0
        self.stepping = False
        self._run, self._name, self._started = run, name, False
        self._inbox: list[Callable[[], None]] = []
        self._requests: dict[int, _Request] = {}
        self._free = [0.0] * environments  # time from which each environment process is free
        self._sessions = [0] * environments  # open sessions of each environment process
        self._sampling_since: float | None = None  # start of the current uninterrupted sampling

    def start(self) -> None:
        """Begin to handle messages."""
        self._started = True
        self._advance()

    def post(self, action: Callable[[], None]) -> None:
        """Handle a message now, or after the current step."""
        self._inbox.append(action)
        if self._started and not self.stepping:
            self._advance()

    def publish(self, version: int) -> None:
        """Take new weights between two steps."""
        self.post(lambda: self.engine.swap_weights(version))

    def admit(self, group: _Group) -> None:
        """Open the sessions of a group, then sample its first turns."""
        shape, run = group.shape, self._run

        def sample_first_turns() -> None:
            samples = [episode[0].sampled for episode in shape.episodes]
            self._enter_request(shape.prompt.tolist(), samples, _Request(group, range(len(samples)), 0))

        def open_sessions() -> None:
            for _ in shape.episodes:  # each goes to the process with the fewest sessions, after earlier work
                lane = min(range(len(self._sessions)), key=self._sessions.__getitem__)
                self._sessions[lane] += 1
                self._free[lane] = max(self._free[lane], run.now) + run.environment.task / len(shape.episodes)
                group.lanes.append(lane)
            run.schedule(max(self._free[lane] for lane in group.lanes), lambda: self.post(sample_first_turns))

        self.post(open_sessions)

    def _enter_request(self, prompt: list[int], tokens: Sequence[Tokens], request: _Request) -> None:
        self._requests[self.engine.submit(prompt, tokens)] = request

    def _advance(self) -> None:
        """Handle the messages, then compute a step of the engine if there is anything to sample."""
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()
        if not self.engine.unfinished:
            self.end_span()
            if self._inbox:
                self._advance()
            return
        run, engine = self._run, self.engine
        self.stepping = True
        self._sampling_since = run.now if self._sampling_since is None else self._sampling_since
        engine.predicted.slowdown = run.slowdown()
        engine.clock.now = run.now
        deltas = engine.step()
        run.schedule(engine.clock.now, lambda: self._finish_step(deltas))

    def end_span(self) -> None:
        """Record the span in which the worker has sampled until now."""
        if self._sampling_since is not None:
            self._run.result.add_span(self._name, "sample", self._sampling_since, self._run.now)
            self._sampling_since = None

    def _finish_step(self, deltas: Sequence[Delta]) -> None:
        self.stepping = False
        for delta in deltas:
            self._finish_turn(delta)
        self._advance()

    def _finish_turn(self, delta: Delta) -> None:
        """Pass a finished turn to the environment, which answers later."""
        request = self._requests[delta.request_id]
        group, turn, sample = request.group, request.turn, request.samples[delta.sample]
        group.versions.update(delta.policy_version)
        run, episode, lane = self._run, group.shape.episodes[sample], group.lanes[sample]
        wait = run.environment.answer_wait(group.shape, sample, turn, run.rng)
        each = (run.times.episode + run.environment.episode) / len(episode)
        seconds = run.times.answer + each + wait
        self._free[lane] = max(self._free[lane], run.now) + seconds

        def take_answer() -> None:
            if turn + 1 < len(episode):
                context = turn_context(group.shape, sample, turn + 1)
                self._enter_request(context, [episode[turn + 1].sampled], _Request(group, [sample], turn + 1))
                return
            group.finished += 1
            self._sessions[lane] -= 1
            if group.finished == len(group.shape.episodes):
                self.groups -= 1
                run.add_finished_group(group)

        run.schedule(self._free[lane], lambda: self.post(take_answer))


def simulate_run(scenario: Scenario) -> RunResult:
    """Simulate a stage. The same arguments give the same result."""
    kind = SynchronousRun if scenario.plan.asynchronous is None else AsynchronousRun
    return kind(scenario).run()
