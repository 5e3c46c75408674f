"""Spans: what each agent of an episode did, when, and who used the result.

The clock of an episode counts rounds. All turns that are due at the same time are sampled in one round, and a
turn is due as soon as everything that it depends on is finished. So the number of rounds is the longest path
through the turns of the episode: its critical steps. Where every sub-agent is joined at the stage that
started it, this is sum over stages t of S_main(t) + max_i S_sub,i(t) (Kimi K2.5, arXiv 2602.02276).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


def make_span_id(player: int, agent: str) -> str:
    """Return "0" for player 0 (agent ""), and "0.2" for its sub-agent "2"."""
    return f"{player}.{agent}" if agent else f"{player}"


@dataclass(frozen=True, slots=True)
class Span:
    """The part of one agent in an episode.

    Attributes:
        span_id: "0" for the episode's player (its index), and for a sub-agent that of its parent, a dot and
            a number: "0.2", "0.2.0".
        name: "agent", or the purpose that the environment gave a sub-agent, such as "ask".
        rounds: the rounds in which its turns were sampled, ascending.
        joined: round of the last turn of its parent that received this agent's result; -1 if none did: the
            parent never asked for it, or code turned it into the final answer. The environment states it.
        prompt_tokens: number of tokens in its context that no policy sampled.
        tokens: number of sampled tokens.
        policy_version: version of the weights that sampled its last token; -1 if there is none.
        messages: the conversation of a sub-agent; empty for the player, whose messages the episode has.
        token_ids: all tokens of a sub-agent's context, with its prompt; empty for the player, and in files of
            earlier versions.
        loss_mask: True at the sampled tokens of `token_ids`.
        finish_reason: how a sub-agent's last turn ended: "stop", "aborted", or "length" for a limit, which
            may also have prevented a turn; "" where there are no `token_ids`.
    """

    span_id: str
    name: str
    rounds: tuple[int, ...]
    joined: int
    prompt_tokens: int
    tokens: int
    policy_version: int
    messages: tuple[Mapping[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    finish_reason: Literal["", "stop", "length", "aborted"] = ""

    @property
    def parent(self) -> str:
        """Id of the agent that started this one; "" for the player."""
        return self.span_id.rpartition(".")[0]

    @property
    def begin(self) -> int:
        """The round of its first turn; -1 without turns."""
        return self.rounds[0] if self.rounds else -1

    @property
    def end(self) -> int:
        """The round after its last turn; -1 without turns."""
        return self.rounds[-1] + 1 if self.rounds else -1


def critical_steps(spans: Sequence[Span]) -> int:
    """Return the number of turns on the longest path through the episode."""
    return len({number for span in spans for number in span.rounds})


def total_steps(spans: Sequence[Span]) -> int:
    """Return the number of turns of all agents."""
    return sum(len(span.rounds) for span in spans)
