"""Sessions of an environment in a process of its own: what goes wrong in one of them costs that one.

A session is its task, its seed and the actions so far. So when the process has to be replaced, because one of
its sessions hung or took it down, the others are played again in the new one and go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from perilune.environments.core.protocol import Environment, Failure, Message, Observation, Task, Transcript
from perilune.verifiers.hosting import TEXT_CHECKSUM
from perilune.verifiers.process import Call, EnvironmentProcess
from perilune.verifiers.scorer import Judging, Scorer, fields, figures

ROLES = frozenset({"system", "user", "tool"})


@dataclass(slots=True, eq=False)
class RemoteSession:
    """A session that is held elsewhere.

    Attributes:
        found: what its last step led to; a Failure ends it.
        is_held: whether a process holds it; one of a single turn is but a transcript to be judged.
    """

    number: int
    task: Task
    seed: int
    process: EnvironmentProcess
    is_held: bool
    result: Observation | Failure = field(default_factory=Observation)
    actions: list[str] = field(default_factory=list)
    generation: int = -1  # of the process that holds it


class Sessions:
    """Opens, advances and closes sessions of `environment`, many at a time.

    Args:
        scorer: whose processes run them.
    """

    def __init__(self, scorer: Scorer, environment: Environment) -> None:
        self._scorer = scorer
        self._players = getattr(environment, "players", 1)
        self._is_held = getattr(environment, "max_turns", 1) > 1
        self._count = 0

    def open(self, games: Sequence[tuple[Task, int]]) -> list[RemoteSession]:
        """Begin a session for each task and seed."""
        sessions = []
        for task, seed in games:
            process = self._scorer.processes[self._count % len(self._scorer.processes)]
            sessions.append(RemoteSession(self._count, task, seed, process, self._is_held))
            self._count += 1
            process.begin_sessions(self._is_held)
        if self._is_held:
            self._ask([_Begin(one, self._players) for one in sessions], sessions)
        return sessions

    def step(self, moves: Sequence[tuple[RemoteSession, str, bool]]) -> None:
        """Take an action in each of these sessions; what it led to is then their `found`.

        Args:
            moves: session, action, and whether the action was finished.
        """
        calls: list[Call] = []
        for session, action, finished in moves:
            session.actions.append(action)
            if self._is_held:
                calls.append(_Move(session, self._players, action, finished))
            else:
                calls.append(_Answer(session.task, Transcript(action, finished, seed=session.seed)))
        self._ask(calls, [session for session, _, _ in moves])

    def close(self, sessions: Sequence[RemoteSession]) -> None:
        """Let go of these sessions."""
        held = [one for one in sessions if one.generation == one.process.generation]
        for process in self._scorer.processes:
            process.ask([_Close(one) for one in held if one.process is process])
            process.end_sessions(sum(one.is_held for one in sessions if one.process is process))

    def _ask(self, calls: Sequence[Call], sessions: Sequence[RemoteSession]) -> None:
        for process in self._scorer.processes:
            mine = [(call, one) for call, one in zip(calls, sessions, strict=True) if one.process is process]
            found = process.ask([call for call, _ in mine])
            for (_, session), what in zip(mine, found, strict=True):
                session.result = what


@dataclass(frozen=True, slots=True)
class _Begin:
    """Open a session, and take the actions it has had."""

    session: RemoteSession
    players: int
    finished: bool = True
    boundary: str = "environment"
    is_verdict: bool = False

    @property
    def steps(self) -> int:
        return 1 + len(self.session.actions)

    def document(self, generation: int) -> Mapping[str, Any]:
        one = self.session
        one.generation = generation
        return {
            "session": one.number,
            "task": fields(one.task),
            "seed": one.seed,
            "actions": one.actions,
            "finished": self.finished,
        }

    def read(self, answer: Mapping[str, Any]) -> Observation | Failure:
        return read_observation(answer["observation"], self.players)


@dataclass(frozen=True, slots=True)
class _Move:
    """Take one action, in the process that holds the session, or after playing it again in a new one."""

    session: RemoteSession
    players: int
    action: str
    finished: bool
    boundary: str = "environment"
    is_verdict: bool = False

    @property
    def _again(self) -> _Begin:
        return _Begin(self.session, self.players, self.finished)

    @property
    def steps(self) -> int:
        return 1 if self.session.generation == self.session.process.generation else self._again.steps

    def document(self, generation: int) -> Mapping[str, Any]:
        if self.session.generation != generation:
            return self._again.document(generation)
        return {"session": self.session.number, "action": self.action, "finished": self.finished}

    def read(self, answer: Mapping[str, Any]) -> Observation | Failure:
        found = read_observation(answer["observation"], self.players)
        if isinstance(found, Failure):
            return found
        return replace(found, info={**found.info, TEXT_CHECKSUM: answer[TEXT_CHECKSUM]})


@dataclass(frozen=True, slots=True)
class _Close:
    session: RemoteSession
    boundary: str = "environment"
    is_verdict: bool = False
    steps: int = 1

    def document(self, generation: int) -> Mapping[str, Any]:
        return {"session": self.session.number, "close": True}

    def read(self, answer: Mapping[str, Any]) -> None:
        return None


class _Answer(Judging):
    """The only action of a session of one turn."""

    __slots__ = ()

    def read(self, answer: Mapping[str, Any]) -> Any:
        outcome = Judging.read(self, answer)
        if isinstance(outcome, Failure):
            return outcome
        return Observation(
            rewards=(outcome.reward,), terms=outcome.terms, metrics=outcome.metrics, done=True,
            info={TEXT_CHECKSUM: answer[TEXT_CHECKSUM]},
        )  # fmt: skip


def read_observation(document: Mapping[str, Any], players: int) -> Observation | Failure:
    """An observation that came from a process; one that makes no sense is a Failure of the environment.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: when it is no observation at all.
    """
    legal = document["legal"]
    found = Observation(
        messages=tuple(map(_message, document["messages"])),
        player=int(document["player"]),
        rewards=tuple(map(float, document["rewards"])),
        terms=figures(document["terms"]),
        metrics=figures(document["metrics"]),
        done=bool(document["done"]),
        truncated=bool(document["truncated"]),
        legal=None if legal is None else tuple(map(str, legal)),
        info=dict(document["info"]),
    )
    wrong = next((said for said, holds in _WRONG.items() if holds(found, players)), None)
    return found if wrong is None else Failure("environment", wrong)


def _message(message: Mapping[str, Any]) -> Message:
    return {"role": str(message["role"]), "content": str(message["content"])}


_WRONG: Mapping[str, Callable[[Observation, int], bool]] = {
    "a figure is not finite": lambda one, _: (
        not all(map(math.isfinite, (*one.rewards, *one.terms.values(), *one.metrics.values())))
    ),
    "rewards are not one a player": lambda one, players: len(one.rewards) not in (0, players),
    "a player moves who does not play": lambda one, players: not (one.done or 0 <= one.player < players),
    "the player to move has no legal action": lambda one, _: not one.done and one.legal == (),
    "a message is neither of user, tool nor system": lambda one, _: any(
        message["role"] not in ROLES for message in one.messages
    ),
}
