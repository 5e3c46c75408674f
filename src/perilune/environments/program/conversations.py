"""The conversations of a program: which call continues which, and which begins another.

The program sends the whole conversation with each call. If it repeats an earlier one and the policy's reply
to it, the policy's tokens are continued. If it has changed earlier messages, or uses its model for something
else, the call begins a conversation of its own. The first conversation is the player's, and all others are
its sub-agents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.environments.core.protocol import AgentTurn, EpisodeFailedError
from perilune.environments.program.chat import ChatAnswer, Said
from perilune.environments.program.gateway import Call


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation so far.

    Attributes:
        agent: "" for the first, and then "0", "1" and so on.
        said: its messages, with the policy's last reply.
    """

    agent: str
    said: tuple[Said, ...] = ()

    def is_continued_by(self, said: Sequence[Said]) -> bool:
        """Whether `said` adds messages to it, none of which speaks for the policy."""
        count = len(self.said)
        added = said[count:]
        return (
            tuple(said[:count]) == self.said and bool(added) and all(one.role != "assistant" for one in added)
        )

    def extend(self, answer: ChatAnswer) -> None:
        """Append the messages of a call, and its answer."""
        self.said = (*answer.request.said, answer.said)


class Conversations:
    """The conversations of one episode.

    Args:
        branches: whether there may be several.
    """

    def __init__(self, branches: bool) -> None:
        self._all: list[Conversation] = []
        self._branches = branches

    def place(self, calls: Sequence[Call]) -> list[tuple[Conversation, Call, AgentTurn]]:
        """Each call with its conversation and the turn that answers it, the player's own first.

        Calls made at the same time are ordered by what they say, so that the order in which they arrive makes
        no difference.

        Raises:
            EpisodeFailedError: for a second conversation without `branches`.
        """
        placed: list[tuple[Conversation, Call, AgentTurn]] = []
        for call in sorted(calls, key=lambda call: [one.message()["content"] for one in call.request.said]):
            said = call.request.said
            free = [one for one in self._all if all(one is not taken for taken, _, _ in placed)]
            found = [one for one in free if one.is_continued_by(said)]
            conversation = max(found, key=lambda one: len(one.said)) if found else self._begin()
            messages = tuple(one.message() for one in said[len(conversation.said) :])
            placed.append((conversation, call, AgentTurn(conversation.agent, messages, "conversation")))
        return sorted(placed, key=lambda one: one[0].agent != "")

    def _begin(self) -> Conversation:
        if self._all and not self._branches:
            raise EpisodeFailedError(
                "environment", "the program changed earlier messages, or began a second conversation"
            )
        conversation = Conversation(str(len(self._all) - 1) if self._all else "")
        self._all.append(conversation)
        return conversation
