"""Small environments that start quickly: {"id": "factory", "factory": "task_environments:Digits"}."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from perilune.environments import (
    AgentProgram,
    AgentTurn,
    EpisodeFailedError,
    EpisodeGenerator,
    Failure,
    KeyedRandom,
    MultiTurn,
    Observation,
    Outcome,
    Score,
    Split,
    Task,
    Transcript,
    ask,
    end_episode,
    gather,
    sample,
)


class Digits:
    """Write digits: the reward is the share of digits in an answer, so that even a new policy can improve.

    Keys of the section: `raises`, `hangs` and `refuses` list first hex digits of task ids whose scorer does
    so. The scorer raises on answers that start with a character of `raises_on`. `equal` is the reward of
    every answer, `limit` the number of questions, `prefix` the text before each question, and `answer` the
    reference answer.
    """

    id = "digits"

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.section = dict(section)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for number in range(self.section.get("limit", 100_000)):
            question = f"{self.section.get('prefix', '')}{(number * 7919 + seed * 104_729) % 100_003}="
            task_id = sha256(question.encode()).hexdigest()[:16]
            if (task_id[-1] in "0123") == (split == "heldout"):
                prompt = ({"role": "user", "content": question},)
                data = {"answer": self.section.get("answer", question.strip("=")[::-1])}
                yield Task(task_id, prompt, data, difficulty=float(number % 2))

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        first = task.task_id[0]
        if first in self.section.get("raises", "") or transcript.text[:1] in self.section.get(
            "raises_on", []
        ):
            raise ValueError("no idea what this is")
        if first in self.section.get("hangs", ""):
            time.sleep(3600)
        if first in self.section.get("refuses", ""):
            return Failure("environment", "nobody can judge this")
        if "equal" in self.section:
            return Score(self.section["equal"])
        text = transcript.text
        share = sum(character.isdigit() for character in text) / max(len(text), 1)
        kind = "digits" if share > 0.5 else "other"
        return Score(share, {"digits": share}, {f"strategy/{kind}": 1.0})


class Ends(Digits):
    """The reward is 1 for an answer with a digit and 0 otherwise, so that a new policy sometimes passes."""

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        return Score(float(any(character.isdigit() for character in transcript.text)))


class OnlyTraining(Digits):
    """Answers to training tasks are always right, answers to held-out tasks never."""

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        return Score(float(task.task_id[-1] not in "0123"))


class Silent(Digits):
    """The questions are empty."""

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for task in super().tasks(split, seed):
            yield Task(task.task_id, ({"role": "user", "content": ""},), task.data)


class Fades(Digits):
    """Rewards are lower from the 31st task on."""

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for number, task in enumerate(super().tasks(split, seed)):
            yield replace(task, data={**task.data, "number": number})

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        share = sum(character.isdigit() for character in transcript.text) / max(len(transcript.text), 1)
        return Score((0.5 + share) * (1.0 if task.data["number"] < 30 else 0.3))


class HalfRight(Ends):
    """Like Ends, with labels independent of the reward: half of the tasks are right."""

    def is_right(self, task: Task, transcript: Transcript) -> bool:
        return int(task.task_id[0], 16) % 2 == 0


class Talk(MultiTurn):
    """Three turns, each answered with the length of the action. The reward is the share with a digit.

    Keys of the section: `players`, `turns`, `most` (tokens of each turn after the first), and `unsteady`
    (the prompt changes every time). `raises`, `hangs`, `nan`, `stuck`, `dies` and `sandbox` list first
    characters of actions that cause that failure.
    """

    id = "talk"

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.section = dict(section)
        self.players = section.get("players", 1)
        self.turns = section.get("turns", 3)
        self.max_turns = 1 + self.turns * self.players

    tasks = Digits.tasks

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        luck = rng.integer(1000, "luck") if "unsteady" not in self.section else time.perf_counter_ns()
        worth = [0.0] * self.players
        action = yield ask(f"luck {luck} ")
        for turn in range(self.turns * self.players):
            player = turn % self.players
            self.wait(rng, turn)
            worth[player] += any(character.isdigit() for character in action) / self.turns
            if turn + 1 < self.turns * self.players:
                action = yield self._answer(action, (turn + 1) % self.players)
        yield end_episode(*worth, terms={"digits": sum(worth)}, metrics={"strategy/talk": 1.0})

    def wait(self, rng: KeyedRandom, turn: int) -> None:
        """Called after each action."""

    def _answer(self, action: str, player: int) -> Observation:
        match next(
            (what for what, on in self.section.items() if isinstance(on, list) and action[:1] in on), ""
        ):
            case "raises":
                raise ValueError("no idea what this is")
            case "hangs":
                time.sleep(3600)
            case "nan":
                return ask("?", player=player, rewards=(math.nan,) * self.players)
            case "stuck":
                return ask("?", player=player, legal=())
            case "dies":
                os._exit(3)
            case "sandbox":
                raise EpisodeFailedError("sandbox", "no room")
        observation = ask(f"[{len(action)}]", player=player, role="tool")
        if (most := self.section.get("most")) is None:
            return observation
        return replace(
            observation, messages=(), turns=(AgentTurn("", observation.messages, max_tokens=most),)
        )


class Waits(Talk):
    """Like Talk. Actions end at the first vowel or digit, and each is followed by a wait of up to 0.1 s."""

    id = "waits"
    stop_texts = tuple("aeiou0123456789")

    def wait(self, rng: KeyedRandom, turn: int) -> None:
        time.sleep(rng.integer(100, "wait", turn) / 1000)


class Team(MultiTurn):
    """The player starts sub-agents in three stages. The reward is the share of turns with a digit.

    The task decides the number of turns of each sub-agent. The first sub-agent of a stage starts a nested
    sub-agent after its first turn and waits for it.
    """

    id = "team"
    max_turns = 8

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.section = dict(section)

    tasks = Digits.tasks

    @staticmethod
    def stages(task: Task) -> list[list[tuple[int, int]]]:
        """For each sub-agent of each stage, its turns and those of its nested sub-agent."""
        digits = [int(digit, 16) for digit in task.task_id]
        return [
            [(digits[stage + turn] % 3 + 1, digits[9 + stage] % 4 * (not turn)) for turn in range(stage + 1)]
            for stage in range(3)
        ]

    def part(self, name: str, turns: int, nested: int) -> AgentProgram[list[str]]:
        texts, results = [], ()
        for number in range(turns):
            prompt = ({"role": "user", "content": f"do {number} "},)
            texts += yield [AgentTurn(name, prompt, "part", 6, results=results)]
            results = ()
            if nested and not number:
                texts += yield from self.part(f"{name}.0", nested, 0)
                results = (f"{name}.0",)
        return texts

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        texts = [(yield ask("begin "))]
        begun = 0
        for stage in self.stages(task):
            parts = [self.part(str(begun + index), *turns) for index, turns in enumerate(stage)]
            for answers in (yield from sample(gather(parts))):
                texts += answers
            names = [str(begun + index) for index in range(len(stage))]
            begun += len(stage)
            texts.append((yield ask(f"[{len(texts)}]", results=names)))
        yield end_episode(sum(any(map(str.isdigit, text)) for text in texts) / len(texts))


class Wordless(Team):
    """The player sends a sub-agent an empty prompt. Every second task also begins with an empty prompt."""

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        yield ask("" if task.data["blank"] else "begin ")
        (answer,) = yield from sample(self.empty())
        yield end_episode(float(answer == ""))

    def empty(self) -> AgentProgram[list[str]]:
        return (yield [AgentTurn("0", ({"role": "user", "content": ""},), "part", 6)])

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for number, task in enumerate(super().tasks(split, seed)):
            yield replace(task, prompt=(), data={**task.data, "blank": number % 2})


class Beside(Team):
    """The player and a sub-agent take turns at the same time."""

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        yield from sample(self.rounds())
        yield end_episode(1.0)

    def rounds(self) -> AgentProgram[None]:
        for number in range(self.max_turns):
            prompt = ({"role": "user", "content": f"do {number} "},)
            yield [AgentTurn("", prompt), AgentTurn("0", prompt, "part", 6)]


class Long(MultiTurn):
    """Three turns with tool outputs between them. The reward is the share of digits in the last action."""

    id, max_turns, cut_off = "long", 3, "0"  # so that an overlong action does not end the episode

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.section = dict(section)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        return Digits({}).tasks(split, seed)

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        yield ask()
        yield ask("12345", role="tool")
        action = yield ask("67890", role="tool")
        yield end_episode(sum(character.isdigit() for character in action) / max(len(action), 1))
