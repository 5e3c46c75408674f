"""The conversations of a program. A call continues one of them or begins another.

The program sends the whole conversation with each call. If it repeats an earlier one and the policy's reply
to it, the policy's tokens are continued. If it has changed earlier messages, or uses its model for something
else, the call begins a conversation of its own. The first conversation is the player's, and all others are
its sub-agents.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from perilune.environments.core.protocol import AgentTurn, EpisodeFailedError
from perilune.environments.program.chat import ChatAnswer, ChatMessage
from perilune.environments.program.gateway import Call


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation so far.

    Attributes:
        agent: "" for the first, and then "0", "1" and so on.
        messages: those so far, with the policy's last reply.
        replied_at: when the program got the last reply (time.monotonic); None without a reply that the
            player has not received yet.
    """

    agent: str
    messages: tuple[ChatMessage, ...] = ()
    replied_at: float | None = None

    def is_continued_by(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether `messages` adds messages to it, none of which speaks for the policy."""
        count = len(self.messages)
        added = messages[count:]
        return (
            tuple(messages[:count]) == self.messages
            and bool(added)
            and all(message.role != "assistant" for message in added)
        )

    def extend(self, answer: ChatAnswer) -> None:
        self.replied_at = time.monotonic()
        self.messages = (*answer.request.messages, answer.message)


class Conversations:
    """The conversations of one episode.

    Args:
        branches: whether there may be several.
    """

    def __init__(self, branches: bool) -> None:
        self._all: list[Conversation] = []
        self._branches = branches

    def match_calls(self, calls: Sequence[Call]) -> list[tuple[Conversation, Call, AgentTurn]]:
        """Return each call with its conversation and the turn that answers it, the player's own first.

        Calls made at the same time are ordered by their messages, not by their arrival.

        Raises:
            EpisodeFailedError: for a second conversation without `branches`.
        """
        matched: list[tuple[Conversation, Call, AgentTurn]] = []
        for call in sorted(calls, key=_call_texts):
            messages = call.request.messages
            free = [chat for chat in self._all if all(chat is not used for used, _, _ in matched)]
            continued = [chat for chat in free if chat.is_continued_by(messages)]
            longest = max(continued, key=lambda chat: len(chat.messages), default=None)
            conversation = longest or self._start_conversation()
            new = tuple(message.to_text() for message in messages[len(conversation.messages) :])
            results = () if conversation.agent else self._take_replied(call)
            turn = AgentTurn(conversation.agent, new, "conversation", results=results)
            matched.append((conversation, call, turn))
        return sorted(matched, key=lambda match: match[0].agent != "")

    def _take_replied(self, call: Call) -> tuple[str, ...]:
        """Return the sub-agents whose replies the program got before it made this call of the player."""
        replied = [
            chat
            for chat in self._all
            if chat.agent and chat.replied_at is not None and chat.replied_at <= call.made_at
        ]
        for chat in replied:
            chat.replied_at = None
        return tuple(chat.agent for chat in replied)

    def _start_conversation(self) -> Conversation:
        if self._all and not self._branches:
            raise EpisodeFailedError(
                "environment", "the program changed earlier messages, or began a second conversation"
            )
        conversation = Conversation(str(len(self._all) - 1) if self._all else "")
        self._all.append(conversation)
        return conversation


def _call_texts(call: Call) -> list[str]:
    return [message.to_text()["content"] for message in call.request.messages]
