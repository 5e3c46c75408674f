"""Sessions of an environment in a separate process. A problem in one session affects only that session.

A session is determined by its task, its seed and the actions so far. If the process has to be replaced
because one session hung or crashed it, the other sessions are replayed in the new process.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from perilune.environments.core.mixture import find_part
from perilune.environments.core.protocol import (
    AgentTurn,
    Environment,
    Failure,
    Message,
    Observation,
    Task,
    Transcript,
)
from perilune.verifiers.process import Call, EnvironmentProcess
from perilune.verifiers.scorer import ScoreCall, slot_values
from perilune.verifiers.worker import TEXT_CHECKSUM_KEY, to_floats

ROLES = frozenset({"system", "user", "assistant", "tool"})
AGENT_ID = re.compile(r"\d{1,9}(\.\d{1,9})*")


@dataclass(slots=True, eq=False)
class RemoteSession:
    """A session in another process.

    Attributes:
        is_held: whether a process holds the session. A single-turn session is only a transcript to score.
        result: the latest observation, or a Failure, which ends the session.
        actions: all actions so far.
        cut_off: indices of the actions that a limit cut off.
        generation: generation of the worker that holds the session.
    """

    number: int
    task: Task
    seed: int
    process: EnvironmentProcess
    is_held: bool
    result: Observation | Failure = field(default_factory=Observation)
    actions: list[str] = field(default_factory=list)
    cut_off: list[int] = field(default_factory=list)
    generation: int = -1


class Sessions:
    """Opens, advances and closes many sessions of `environment` at a time.

    Args:
        processes: the processes among which sessions are distributed.
    """

    def __init__(self, processes: Sequence[EnvironmentProcess], environment: Environment) -> None:
        self._processes = processes
        self._environment = environment
        self._players = getattr(environment, "players", 1)
        self._count = 0

    def open(self, tasks: Sequence[tuple[Task, int]]) -> list[RemoteSession]:
        """Open a session for each task and seed."""
        sessions = []
        for task, seed in tasks:
            process = self._processes[self._count % len(self._processes)]
            is_held = getattr(find_part(self._environment, task), "max_turns", 1) > 1
            sessions.append(RemoteSession(self._count, task, seed, process, is_held))
            self._count += 1
            process.begin_sessions(is_held)
        if held := [session for session in sessions if session.is_held]:
            self._ask([_Begin(session, self._players) for session in held], held)
        return sessions

    def step(self, moves: Sequence[tuple[RemoteSession, Sequence[str], bool]]) -> None:
        """Apply the actions of all due turns of each session, and set the session's `result`.

        Args:
            moves: for each session: the session, its actions, and False if a limit cut off the first action,
                which is the player's own.
        """
        calls: list[Call] = []
        for session, actions, finished in moves:
            session.cut_off += [] if finished else [len(session.actions)]
            session.actions += actions
            if session.is_held:
                calls.append(_Move(session, self._players, actions, finished))
            else:
                (answer,) = actions
                calls.append(_Answer(session.task, Transcript(answer, finished, seed=session.seed)))
        self._ask(calls, [session for session, _, _ in moves])
        for session, actions, finished in moves:
            if not finished and isinstance(session.result, Observation) and session.result.truncated:
                del session.actions[len(session.actions) - len(actions) + 1 :]  # the first ended the episode

    def close(self, sessions: Sequence[RemoteSession]) -> None:
        alive = [session for session in sessions if session.generation == session.process.generation]
        for process in self._processes:
            process.ask([_Close(session) for session in alive if session.process is process])
            process.end_sessions(sum(session.is_held for session in sessions if session.process is process))

    def _ask(self, calls: Sequence[Call], sessions: Sequence[RemoteSession]) -> None:
        """Make the calls and set the sessions' results.

        Each process gets the transcripts to score and the moves of held sessions in separate batches.
        """
        for process, is_held in product(self._processes, (False, True)):
            pairs = [
                (call, session)
                for call, session in zip(calls, sessions, strict=True)
                if session.process is process and session.is_held == is_held
            ]
            results = process.ask([call for call, _ in pairs])
            for (_, session), result in zip(pairs, results, strict=True):
                session.result = result


@dataclass(frozen=True, slots=True)
class _Begin:
    """Open a session and replay its actions."""

    session: RemoteSession
    players: int
    latest: int = 0  # number of actions of the last round
    finished: bool = True  # False if the first action of the last round was cut off
    boundary: str = "environment"
    is_verdict: bool = False

    @property
    def steps(self) -> int:
        return 1 + len(self.session.actions)

    def document(self, generation: int) -> Mapping[str, Any]:
        session = self.session
        session.generation = generation
        return {
            "session": session.number,
            "task": slot_values(session.task),
            "cut_off": session.cut_off,
            "seed": session.seed,
            "earlier": session.actions[: len(session.actions) - self.latest],
            "actions": session.actions[len(session.actions) - self.latest :],
            "finished": self.finished,
        }

    def read(self, answer: Mapping[str, Any]) -> Observation | Failure:
        return read_observation(answer["observation"], self.players)


@dataclass(frozen=True, slots=True)
class _Move:
    """Apply actions in the worker that holds the session, or replay the session in a new worker."""

    session: RemoteSession
    players: int
    actions: Sequence[str]
    finished: bool
    boundary: str = "environment"
    is_verdict: bool = False

    @property
    def _replay(self) -> _Begin:
        return _Begin(self.session, self.players, len(self.actions), self.finished)

    @property
    def steps(self) -> int:
        is_held = self.session.generation == self.session.process.generation
        return len(self.actions) if is_held else self._replay.steps

    def document(self, generation: int) -> Mapping[str, Any]:
        if self.session.generation != generation:
            return self._replay.document(generation)
        return {"session": self.session.number, "actions": self.actions, "finished": self.finished}

    def read(self, answer: Mapping[str, Any]) -> Observation | Failure:
        observation = read_observation(answer["observation"], self.players)
        if isinstance(observation, Failure):
            return observation
        return replace(observation, info={**observation.info, TEXT_CHECKSUM_KEY: answer[TEXT_CHECKSUM_KEY]})


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


class _Answer(ScoreCall):
    """The only action of a single-turn session."""

    __slots__ = ()

    def read(self, answer: Mapping[str, Any]) -> Any:
        outcome = ScoreCall.read(self, answer)
        if isinstance(outcome, Failure):
            return outcome
        info = {TEXT_CHECKSUM_KEY: answer[TEXT_CHECKSUM_KEY]}
        rewards = (outcome.reward,)
        return Observation((), 0, rewards, outcome.terms, outcome.metrics, done=True, info=info)


def read_observation(document: Mapping[str, Any], players: int) -> Observation | Failure:
    """Parse an observation from another process. An invalid one is a Failure of the environment.

    Raises:
        KeyError, TypeError, ValueError, OverflowError, AttributeError: if it is malformed.
    """
    legal = document["legal"]
    observation = Observation(
        messages=tuple(map(_message, document["messages"])),
        player=int(document["player"]),
        rewards=tuple(map(float, document["rewards"])),
        terms=to_floats(document["terms"]),
        metrics=to_floats(document["metrics"]),
        done=bool(document["done"]),
        truncated=bool(document["truncated"]),
        legal=None if legal is None else tuple(map(str, legal)),
        info=dict(document["info"]),
        turns=tuple(_agent_turn(turn) for turn in document["turns"]),
    )
    reason = next((reason for reason, applies in _REASONS.items() if applies(observation, players)), None)
    return observation if reason is None else Failure("environment", reason)


def _message(message: Mapping[str, Any]) -> Message:
    return {"role": str(message["role"]), "content": str(message["content"])}


def _agent_turn(fields: Sequence[Any]) -> AgentTurn:
    agent, messages, name, max_tokens, continues, results = fields
    return AgentTurn(
        str(agent),
        tuple(map(_message, messages)),
        str(name),
        None if max_tokens is None else max(1, int(max_tokens)),
        bool(continues),
        tuple(map(str, results)),
    )


def _are_agents_valid(turns: Sequence[AgentTurn]) -> bool:
    agents = [turn.agent for turn in turns]
    return (
        len({*agents}) == len(agents)
        and "" not in agents[1:]
        and all(AGENT_ID.fullmatch(agent) for agent in agents if agent)
    )


def _receives_from_others(turn: AgentTurn) -> bool:
    """Return whether `results` names an agent that is no sub-agent of the turn's agent."""
    return any(
        not AGENT_ID.fullmatch(agent) or agent.rpartition(".")[0] != turn.agent for agent in turn.results
    )


_REASONS: Mapping[str, Callable[[Observation, int], bool]] = {
    "a number is not finite": lambda view, _: (
        not all(map(math.isfinite, (*view.rewards, *view.terms.values(), *view.metrics.values())))
    ),
    "there is not one reward per player": lambda view, players: len(view.rewards) not in (0, players),
    "the player to move does not exist": lambda view, players: not (view.done or 0 <= view.player < players),
    "the player to move has no legal action": lambda view, _: not view.done and view.legal == (),
    "a message has a role other than system, user, assistant and tool": lambda view, _: any(
        message["role"] not in ROLES for turn in view.due for message in turn.messages
    ),
    "sub-agents need distinct ids such as 2 or 2.0, and the player's own turn is the first": lambda view, _: (
        not _are_agents_valid(view.turns)
    ),
    "a turn receives results only of sub-agents that its own agent started": lambda view, _: any(
        map(_receives_from_others, view.turns)
    ),
}
