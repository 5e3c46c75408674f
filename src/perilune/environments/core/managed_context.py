"""The `context` section: rules that shorten the policy's context in a long episode.

When the conversation grows beyond `above`, the policy continues in a new context: the task, the shortened
conversation, and the new messages. The new context is a sub-agent of the episode, so every token keeps the
context in which it was sampled, also in the loss, and contexts with the same beginning share it in the prefix
cache.
"""

import re
from collections.abc import Generator, Sequence
from itertools import chain
from typing import Literal

from pydantic import Field

from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn
from perilune.environments.core.protocol import (
    AgentTurn,
    Environment,
    EpisodeFailedError,
    Message,
    Observation,
    Task,
)
from perilune.environments.core.wrapping import EnvironmentWrapper
from perilune.errors import RequestError
from perilune.frozen import Frozen

CONTEXT_KEY = "context"  # in the environment section of a recipe

Turn = tuple[Message, ...]
"""The environment's messages, and the policy's action."""

_DROPPED = "[dropped]"
_FOLDED = "[{turns} earlier turns are not shown]"
_SUMMARY = "Summary of the earlier turns: {summary}"
_FOLD = re.compile(r"<fold>(.*?)</fold>", re.DOTALL)


class ContextSettings(Frozen):
    """Rules that shorten the context of a long episode."""

    rule: Literal["drop_output", "fold", "summarise", "policy"] = Field(
        description="drop_output: earlier messages of the environment become `[dropped]`; fold: earlier"
        " turns are left out; summarise: the policy summarizes earlier turns; policy: the"
        " policy writes `<fold>TEXT</fold>` in an action, and TEXT replaces all turns so far"
    )
    above: int = Field(
        4000,
        ge=1,
        description="number of characters after the prompt above which the rule applies; the rule policy"
        " ignores it",
    )
    last: int = Field(
        2,
        ge=0,
        le=100,
        description="number of latest turns that the rule leaves unchanged; the rule policy ignores it",
    )
    ask: str = Field(
        "Summarise the work so far. From now on you see only the task and this summary.",
        min_length=1,
        description="message that asks for a summary, with rule: summarise",
    )


class ManagedContext(EnvironmentWrapper, MultiTurn):
    """An environment with several turns whose policy sees the conversation as the rule shortens it.

    Raises:
        RequestError: for an environment with a single turn, several players, or a new context in each turn.
    """

    stops_agents = True  # the environment's stop texts end the turns of all contexts

    def __init__(self, environment: Environment, settings: ContextSettings) -> None:
        own_turns = getattr(environment, "max_turns", 1)
        if own_turns == 1 or getattr(environment, "players", 1) > 1:
            turns = "a single turn" if own_turns == 1 else "several players"
            what = f"needs an environment with several turns and one player; {environment.id} has {turns}"
            raise RequestError(what, where=f"environment.{CONTEXT_KEY}", remedy="remove it")
        if not getattr(environment, "history", True):
            what = f"with history: false {environment.id} begins a new context in each turn"
            raise RequestError(what, where=f"environment.{CONTEXT_KEY}", remedy="remove one of them")
        super().__init__(environment)
        self.max_turns = 2 * own_turns  # a summary is a turn, too; the environment counts its own
        self.cut_off = getattr(environment, "cut_off", None)
        self._settings = settings

    def play(self, task: Task, rng: KeyedRandom) -> EpisodeGenerator:
        session = self._environment.reset(task, rng.seed)
        context = _Context(task, self._settings)
        try:
            while not (observation := session.observation).done:
                if observation.turns:
                    raise EpisodeFailedError("environment", "context does not support sub-agents")
                session.step((yield from context.act(observation.messages)))
        finally:
            session.close()
        figures = {**session.observation.metrics, "contexts": float(context.number + 1)}
        done = session.observation
        yield Observation(
            done.messages, 0, done.rewards, done.terms, figures, done=True, truncated=done.truncated
        )


class _Context:
    """The policy's context in one episode.

    Attributes:
        number: how many contexts came before.
    """

    def __init__(self, task: Task, settings: ContextSettings) -> None:
        self.number = 0
        self._prompt, self._settings = task.prompt, settings
        self._folded = 0  # turns that the rule fold has left out
        self._note = ""  # replaces earlier turns
        self._turns: list[Turn] = []
        self._opening: tuple[Message, ...] = ()  # of a new context, until the policy sees it

    def act(self, messages: tuple[Message, ...]) -> Generator[Observation, str, str]:
        """Return the policy's action on the environment's messages."""
        start = max(len(self._turns) - self._settings.last, 0)
        old, recent = self._turns[:start], self._turns[start:]
        if self._settings.rule != "policy" and old and self._count_chars(messages) > self._settings.above:
            yield from self._shorten(old, recent, messages)
        action: str = yield self._observation(messages)
        fold = _FOLD.search(action) if self._settings.rule == "policy" else None
        if fold:
            action = action[fold.end() :].strip()
            reply: Message = {"role": "assistant", "content": action}
            self._open_context(_SUMMARY.format(summary=fold[1].strip()), [(reply,)] if action else [])
            if action:
                return action
            action = yield self._observation(messages)
        self._turns.append((*messages, {"role": "assistant", "content": action}))
        return action

    def _count_chars(self, messages: Sequence[Message]) -> int:
        history = [*chain.from_iterable(self._turns), *messages]
        return len(self._note) + sum(len(message["content"]) for message in history)

    def _shorten(
        self, old: list[Turn], recent: list[Turn], messages: tuple[Message, ...]
    ) -> Generator[Observation, str, None]:
        """Apply the rule, unless it would change nothing."""
        match self._settings.rule:
            case "drop_output":
                dropped = [tuple(map(_drop_output, turn)) for turn in old]
                if dropped != old:
                    self._open_context(self._note, [*dropped, *recent])
            case "fold":
                self._folded += len(old)
                self._open_context(_FOLDED.format(turns=self._folded), recent)
            case _:
                request: Message = {"role": "user", "content": self._settings.ask}
                summary = yield self._observation((*messages, request))
                self._open_context(_SUMMARY.format(summary=summary.strip()), recent)

    def _open_context(self, note: str, turns: list[Turn]) -> None:
        """Begin a new context with the task, a note and these turns."""
        self.number += 1
        self._note, self._turns = note, turns
        noted: list[Message] = [{"role": "user", "content": note}] if note else []
        self._opening = (*self._prompt, *noted, *chain.from_iterable(turns))

    def _observation(self, messages: tuple[Message, ...]) -> Observation:
        if not self.number:
            return Observation(messages)
        pending, self._opening = (*self._opening, *messages), ()
        opening = _merge_user_messages(pending)
        return Observation(turns=(AgentTurn(str(self.number - 1), opening, "context", continues=True),))


def _drop_output(message: Message) -> Message:
    return message if message["role"] == "assistant" else {**message, "content": _DROPPED}


def _merge_user_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Merge consecutive user messages, because chat templates refuse these."""
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            merged[-1] = {**message, "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return tuple(merged)
