"""A two-player game for tests of self-play: each player names a hidden digit, and the higher digit wins."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from perilune.environments import EpisodeGenerator, KeyedRandom, MultiTurn, Split, Task, ask, end_episode
from perilune.errors import RequestError


class Duel(MultiTurn):
    """Any action but a digit is an illegal move and loses. `opponent: random` names a random digit."""

    id = "duel"
    max_turns = 2
    cut_off = ""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.opponent = section.get("opponent", "self")
        if self.opponent not in ("self", "random"):
            raise RequestError(f"no opponent {self.opponent!r}")
        self.players = 2 if self.opponent == "self" else 1

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for number in range(10_000):
            task_id = hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:32]
            if (task_id[0] == "0") == (split == "heldout"):
                yield Task(task_id, ({"role": "user", "content": "a digit?"},), {})

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        first = yield ask(player=0)
        second = (yield ask(player=1)) if self.players == 2 else str(rng.integer(10, "theirs"))
        values = [int(answer) if answer.isdigit() else -1 for answer in (first, second)]
        won = float(values[0] > values[1]) - float(values[0] < values[1])
        stats = {"illegal": float(min(values) < 0)}
        yield end_episode(won, -won, metrics=stats) if self.players == 2 else end_episode(won, metrics=stats)
