"""A simulated RL stage on a virtual clock: the parts that all stages share, and the synchronous stage.

A synchronous step plays a batch as `RolloutWorker.play` does, and then trains on it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from perilune.simulate.engine import SimulatedEngine
from perilune.simulate.episodes import GroupShape, Lengths
from perilune.simulate.times import RunTimes
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The work of a stage.

    Attributes:
        steps: number of training steps.
        prompts: groups of each training step.
        samples: episodes of each group.
        updates: optimizer steps in each training step.
        epochs: passes over the episodes of a training step.
        forward: passes without gradients over the episodes of a training step, before its updates.
        checked: whether the stage solves a bandit and audits its reward before the first step.
        watched: whether each step computes the log-probs of the initial policy, for the gold score.
        asynchronous: settings of an asynchronous stage; None for a synchronous stage.
        evaluations: steps after which held-out tasks are played; 0 for an evaluation before the first step.
        evaluated: number of held-out tasks, and number of samples of each.
        ranks: number of processes that share a synchronous step.
        cores: number of cores that learner and workers share; None if each process has its own.
    """

    steps: int
    prompts: int
    samples: int
    updates: int = 1
    epochs: int = 1
    forward: int = 0
    checked: bool = False
    watched: bool = False
    asynchronous: AsynchronousSettings | None = None
    evaluations: tuple[int, ...] = ()
    evaluated: tuple[int, int] = (0, 0)
    ranks: int = 1
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentTimes:
    """Seconds of an environment.

    Attributes:
        task: time to make a task.
        episode: CPU time to play and score an episode.
        wait: mean time that each answer waits, for example for a tool.
        spread: sigma of the lognormal distribution of `wait`.
        start: CPU time until one process of the environment has started.
    """

    task: float = 0.0
    episode: float = 0.0
    wait: float = 0.0
    spread: float = 0.0
    start: float = 0.0

    def answer_wait(self, group: GroupShape, sample: int, turn: int, rng: np.random.Generator) -> float:
        """Return the seconds that an answer waits.

        Recorded waits apply to the last answer of an episode. Without them, each answer draws its wait.
        """
        if group.waits:
            return group.waits[sample] if turn + 1 == len(group.episodes[sample]) else 0.0
        if not self.wait:
            return 0.0
        return float(rng.lognormal(np.log(self.wait) - self.spread**2 / 2, self.spread))


@dataclass(frozen=True, slots=True)
class Scenario:
    """The inputs of a simulation. Equal inputs give equal results."""

    plan: RunPlan
    times: RunTimes
    environment: EnvironmentTimes
    lengths: Lengths
    make_engine: Callable[[], SimulatedEngine]
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A span of work of one process, for a trace."""

    process: str
    name: str
    begin: float
    end: float


@dataclass(slots=True)
class RunResult:
    """A simulated stage.

    Attributes:
        seconds: seconds from the submission to the end of the stage.
        start: seconds before the first step.
        steps: seconds of each part of each training step, as in timings.jsonl.
        busy: seconds in which each process computed.
        ages: number of sampled tokens by their age in training steps when they were trained on.
        tokens: number of sampled tokens.
        peak_blocks: largest number of cache blocks in use in one engine, and number of blocks of that engine.
        engine_steps, preemptions: counts of all engines together.
        spans: the work of each process over time.
    """

    seconds: float = 0.0
    start: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    ages: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    peak_blocks: tuple[int, int] = (0, 0)
    engine_steps: int = 0
    preemptions: int = 0
    spans: list[Span] = field(default_factory=list)

    def add_span(self, process: str, name: str, begin: float, end: float) -> None:
        """Add a span of work."""
        self.busy[process] = self.busy.get(process, 0.0) + end - begin
        self.spans.append(Span(process, name, begin, end))

    def add_engine_counts(self, engines: Sequence[SimulatedEngine]) -> None:
        """Add the counts of the engines."""
        self.engine_steps = sum(engine.counters.steps for engine in engines)
        self.preemptions = sum(engine.counters.preemptions for engine in engines)
        fullest = max(engines, key=lambda engine: engine.peak_use)
        self.peak_blocks = round(fullest.peak_use * fullest.block_count), fullest.block_count

    def idle_shares(self) -> dict[str, float]:
        """Return the share of the time after the start in which each process did nothing."""
        seconds = self.seconds - self.start
        return {name: 1 - busy / seconds for name, busy in sorted(self.busy.items())}


class Simulation:
    """Base of simulated stages: the work of the learner, and playing complete batches of episodes."""

    def __init__(self, scenario: Scenario) -> None:
        self.plan, self.times, self.lengths = scenario.plan, scenario.times, scenario.lengths
        self.environment, self.make_engine = scenario.environment, scenario.make_engine
        self.rng = np.random.default_rng((scenario.seed, 1))
        self.result = RunResult()

    def play(self, engine: SimulatedEngine, groups: Sequence[GroupShape]) -> tuple[float, float]:
        """Play groups to their end; return the seconds of sampling, and those of all other work (scoring)."""
        clock, sampling = engine.clock, 0.0
        began = clock.now
        count = sum(len(group.episodes) for group in groups)
        clock.now += self.times.batch + self.environment.task * len(groups)
        clock.now += (self.times.episode + self.environment.episode) * count
        turn = 0
        samples = [(group, sample) for group in groups for sample in range(len(group.episodes))]
        while due := [(group, sample) for group, sample in samples if len(group.episodes[sample]) > turn]:
            before = clock.now
            if turn:
                for group, sample in due:
                    engine.submit(turn_context(group, sample, turn), [group.episodes[sample][turn].sampled])
            else:
                for group in groups:
                    engine.submit(group.prompt.tolist(), [episode[0].sampled for episode in group.episodes])
            while engine.unfinished:
                engine.step()
            sampling += clock.now - before
            waits = (self.environment.answer_wait(*pair, turn, self.rng) for pair in due)
            clock.now += self.times.answer * len(due) + sum(waits)
            turn += 1
        return sampling, clock.now - began - sampling

    def start_seconds(self) -> float:
        """Return the seconds of the stage before its first step and after its last one."""
        return self.times.start + (self.times.checks if self.plan.checked else 0.0)

    def evaluate(self, step: int, now: float) -> float:
        """Play the held-out tasks if an evaluation is due after this step. Return the seconds."""
        if step not in self.plan.evaluations:
            return 0.0
        engine = self.make_engine()
        sampling, scoring = self.play(engine, self.lengths.groups(max(step, 1), *self.plan.evaluated))
        self.result.add_span("learner", "evaluate", now, now + sampling + scoring)
        return sampling + scoring

    def learning_seconds(self, groups: Sequence[GroupShape]) -> float:
        """Return the seconds of the updates of a step, on the groups that have a gradient."""
        plan = self.plan
        live = [group for group in groups if group.live]
        episodes = sum(len(group.episodes) for group in groups)
        share = plan.ranks * plan.updates
        counts = sum(group.fed for group in live), episodes, sum(group.pairs for group in live)
        once = self.times.learn(*(-(-count // share) for count in counts))
        return plan.updates * plan.epochs * once + plan.forward * self.forward_seconds(groups) / plan.ranks

    def forward_seconds(self, groups: Sequence[GroupShape]) -> float:
        """Return the seconds of a pass without gradients over the groups."""
        return self.times.forward(sum(group.fed for group in groups), sum(group.pairs for group in groups))

    def recording_seconds(self, groups: Sequence[GroupShape]) -> float:
        """Return the seconds of the rest of a training step, as in `RunTimes.record`."""
        tokens, answers = sum(group.recorded for group in groups), sum(group.turns for group in groups)
        watching = self.forward_seconds(groups) if self.plan.watched else 0.0
        return self.times.record(tokens, answers, sum(len(group.episodes) for group in groups)) + watching

    def count_tokens(self, groups: Sequence[GroupShape]) -> int:
        """Add the sampled tokens of a step to the result, and return their number."""
        tokens = sum(group.sampled for group in groups)
        self.result.tokens += tokens
        return tokens


class SynchronousRun(Simulation):
    """Every step samples, scores, learns and records, one after the other."""

    def run(self) -> RunResult:
        """Simulate the stage and return its result."""
        plan, result = self.plan, self.result
        engines = [self.make_engine() for _ in range(plan.ranks)]
        now = result.start = self.start_seconds()
        now += self.evaluate(0, now)
        for step in range(1, plan.steps + 1):
            groups = self.lengths.groups(step, plan.prompts, plan.samples)
            result.ages[0] += self.count_tokens(groups)
            parts = []
            for number, engine in enumerate(engines):
                engine.clock.now = now
                engine.swap_weights(step)
                parts.append(self.play(engine, groups[number :: plan.ranks]))
                result.add_span(
                    process_name("sampler", number, plan.ranks), "sample", now, now + parts[-1][0]
                )
            sampling, scoring = max(parts, key=sum)
            learning = self.learning_seconds(groups)
            other = self.recording_seconds(groups)
            result.add_span("scorer", "score", now + sampling, now + sampling + scoring)
            now += sampling + scoring
            result.add_span("learner", "learn", now, now + learning)
            result.add_span("learner", "record", now + learning, now + learning + other)
            now += learning + other
            parts_of_step = {"sampling": sampling, "scoring": scoring, "learning": learning, "other": other}
            result.steps.append({"step": step, **parts_of_step, "evaluation": self.evaluate(step, now)})
            now += result.steps[-1]["evaluation"]
        result.seconds = now
        result.add_engine_counts(engines)
        return result


def turn_context(group: GroupShape, sample: int, turn: int) -> list[int]:
    """Return the tokens before a turn of an episode."""
    episode = group.episodes[sample]
    before = [part for shape in episode[:turn] for part in (shape.observed, shape.sampled)]
    return np.concatenate([group.prompt, *before, episode[turn].observed]).tolist()  # type: ignore[no-any-return]


def process_name(process: str, number: int, count: int) -> str:
    return process if count == 1 else f"{process} {number}"
