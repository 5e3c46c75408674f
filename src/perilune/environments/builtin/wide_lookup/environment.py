"""Wide lookup: an orchestrator reads shards itself, one after another, or spawns sub-agents that read them.

Rewards after PARL (Kimi K2.5, arXiv 2602.02276): the reward is performance, and the terms parallel and finish
are for `auxiliary_rewards` of the rl stage. The report states no formulas for them; those here are ours.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perilune.environments.builtin.wide_lookup.lines import BAD, END, CommandReader, serial_actions
from perilune.environments.builtin.wide_lookup.settings import WideLookupSpec
from perilune.environments.builtin.wide_lookup.tasks import draw_tasks, make_prompt
from perilune.environments.core.agents import AgentProgram, Programs, sample
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, end_episode
from perilune.environments.core.protocol import AgentTurn, Message, Split, Task, Transcript

REWARDED_AGENTS_PER_KEY = 4  # sub-agents for each key from which on the term parallel is 1


class WideLookupEnvironment(MultiTurn):
    """Reward 1 for the values of all keys, if found within the budget of critical steps.

    The term "parallel" grows with the logarithm of the number of spawned sub-agents. "finish" is the share of
    them that ended with a value for each of their keys. "performance" is the reward. A turn of the
    orchestrator that the token limit cut off is not read, and ends the episode.
    """

    Spec = WideLookupSpec
    cut_off = END

    def __init__(self, spec: WideLookupSpec) -> None:
        self.spec = spec
        self.id = "wide_lookup"
        self.max_turns = spec.turns

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        return draw_tasks(self.spec, split, seed)

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        result = yield from sample(_orchestrate(task.data["shards"], self.spec))
        budget = self.spec.critical_budget
        is_right = all(result.notes.get(key) == value for key, value in task.data["values"].items())
        success = float(is_right and (budget is None or result.critical_steps <= budget))
        max_agents = REWARDED_AGENTS_PER_KEY * len(task.data["values"])
        terms = {
            "parallel": min(1.0, math.log1p(result.spawned) / math.log1p(max_agents)),
            "finish": result.finished / max(result.spawned, 1),
            "performance": success,
        }
        yield end_episode(success, terms=terms, metrics={"right": float(is_right), **result.metrics()})

    def gold(self, task: Task) -> Transcript | None:
        """Return a serial read of all shards; None if turns or critical steps do not suffice."""
        *earlier, last = serial_actions(task.data["values"], repeat=self.spec.notes == "last")
        if len(earlier) >= min(self.spec.turns, self.spec.critical_budget or self.spec.turns):
            return None
        return Transcript(last, earlier=tuple(earlier))


@dataclass(slots=True)
class OrchestratorResult:
    """The notes of an orchestrator, and figures of its episode.

    Attributes:
        critical_steps: rounds of turns that were due at the same time.
        spawned: sub-agents that the orchestrator spawned, those without a place included.
        finished: of them, those that ended with a value for each of their keys.
    """

    notes: Mapping[str, str]
    critical_steps: int = 0
    spawned: int = 0
    finished: int = 0
    reads: int = 0
    bad: int = 0

    def metrics(self) -> dict[str, float]:
        strategy = "parallel" if self.spawned else "serial"
        return {
            f"strategy/{strategy}": 1.0,
            "critical_steps": float(self.critical_steps),
            "spawned": float(self.spawned),
            "finished": float(self.finished),
            "own_reads": float(self.reads),
            "bad_lines": float(self.bad),
        }


class SubAgentResult(NamedTuple):
    """The notes of a sub-agent, and whether it ended with the values of all its keys."""

    notes: dict[str, str]
    finished: bool


def _orchestrate(shards: Mapping[str, str], spec: WideLookupSpec) -> AgentProgram[OrchestratorResult]:
    """Return the turns of the orchestrator and of its sub-agents, which run beside it until it joins them."""
    reader = CommandReader(shards, may_spawn=True)
    result = OrchestratorResult(reader.notes)
    agents = Programs[SubAgentResult]()
    started = joined = 0
    messages: tuple[Message, ...] = ()
    received: tuple[str, ...] = ()
    try:
        for _ in range(spec.turns):
            action, *others = yield [AgentTurn("", messages, results=received), *agents.turns]
            received = ()
            result.critical_steps += 1
            agents.take(others)
            if spec.notes == "last":
                reader.notes.clear()
            lines = reader.take(action)
            for keys in reader.spawned:
                result.spawned += 1
                if started < spec.sub_agents:
                    agents.start(_look_up(str(started), keys, shards, spec.sub_agent_turns))
                    started += 1
                else:
                    lines.append(BAD)
            while reader.joins and agents.turns:
                agents.take((yield agents.turns))
                result.critical_steps += 1
            if reader.joins:
                for number in range(joined, started):
                    notes = agents.results[number].notes
                    lines += [f"{key}{value}" for key, value in notes.items()] or [BAD]
                    reader.notes |= notes
                received = tuple(map(str, range(joined, started)))
                joined = started
            if reader.has_ended:
                break
            messages = _make_messages(lines)
    finally:
        agents.close()
    result.finished = sum(returned.finished for returned in agents.results.values())
    result.reads, result.bad = reader.reads, reader.bad
    return result


def _look_up(
    agent: str, keys: list[str], shards: Mapping[str, str], turns: int
) -> AgentProgram[SubAgentResult]:
    """Return the turns of a sub-agent, at most `turns`."""
    reader = CommandReader(shards, may_spawn=False)
    messages = make_prompt(keys)
    for _ in range(turns):
        (action,) = yield [AgentTurn(agent, messages, "look up")]
        messages = _make_messages(reader.take(action))
        if reader.has_ended:
            break
    is_finished = reader.has_ended and all(key in reader.notes for key in keys)
    return SubAgentResult({key: reader.notes[key] for key in keys if key in reader.notes}, is_finished)


def _make_messages(lines: Sequence[str]) -> tuple[Message, ...]:
    return ({"role": "tool", "content": "".join(f"{line}\n" for line in lines) or "\n"},)
