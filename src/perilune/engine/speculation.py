"""Speculative decoding: a step computes several tokens of one sample.

At a small batch size a step takes as long as reading the weights, and a few more tokens cost little. A
proposer drafts the next tokens of a sample. The step computes the logits after each draft token. The sampler
then draws token after token as always, until a drawn token differs from the draft token at its position.
Later steps overwrite the keys and values of the rejected draft tokens.

Leviathan et al. ("Fast inference from transformers via speculative decoding", ICML 2023) accept a draft token
with a probability that keeps the distribution. Here the random number of a position is fixed (`random.py`),
so a draft token is accepted if it equals the drawn token. Samples are the same with and without speculative
decoding.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.engine.blocks import BLOCK
from perilune.engine.sequences import Rows, Sequences
from perilune.engine.step import Counters, Proposal
from perilune.errors import RequestError
from perilune.models.decoder import Decoder

Tokens = NDArray[np.int64]

_WEIGHT_READ_ROWS = 12  # tokens that a CPU computes in the time in which it reads the weights
_PRIOR_COUNTS = 3.0, 4.0  # accepted and tried draft tokens with which the counts of a sample start
_DECAY = 0.98  # factor of the counts per step, so that a sample without proposals gets proposals again
_MAX_MATCH_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """Settings of speculative decoding.

    Attributes:
        method: "lookup" proposes the tokens after an earlier occurrence of the last tokens (Saxena, "Prompt
            lookup decoding", 2023). "draft" samples from a cheaper model.
        tokens: maximum number of tokens to propose for a sample in one step, 1 to 16.
        adaptive: propose fewer tokens, or none, where verifying them takes longer than it saves.
        draft: the cheaper model for "draft": another decoder with the same vocabulary, or None for the model
            itself with matrices in int8.
        match: with "lookup", the minimum length of a match in tokens, 1 to 8.

    Raises:
        RequestError: when a number is out of its range, or a draft is given for "lookup".
    """

    method: Literal["lookup", "draft"] = "lookup"
    tokens: int = 10
    adaptive: bool = True
    draft: Decoder | None = None
    match: int = 2

    def __post_init__(self) -> None:
        for name, limit in (("tokens", BLOCK), ("match", _MAX_MATCH_TOKENS)):
            if not 1 <= getattr(self, name) <= limit:
                raise RequestError(
                    f"{name} is {getattr(self, name)}", where="speculation", remedy=f"give 1 to {limit}"
                )
        if self.method not in {"lookup", "draft"}:
            raise RequestError(
                f"method is {self.method!r}", where="speculation", remedy="give 'lookup' or 'draft'"
            )
        if self.draft is not None and self.method != "draft":
            raise RequestError("lookup uses no draft", where="speculation", remedy="set method to 'draft'")


class Proposer(Protocol):
    """A source of draft tokens.

    Attributes:
        cost: time to draft one token, as a share of a step that computes one token.
    """

    @property
    def cost(self) -> float: ...

    def propose(self, rows: Rows, limits: Tokens) -> list[Tokens]:
        """Return at most `limits` int64[B] tokens for each of `rows` int64[B], whose blocks hold them."""


class Speculation:
    """Chooses the number of tokens to propose from the recent acceptance rate of each sample.

    Args:
        counters: counts proposed and accepted tokens.
    """

    def __init__(
        self, sequences: Sequences, settings: SpeculationSettings, proposer: Proposer, counters: Counters
    ) -> None:
        self._sequences, self._settings, self._proposer = sequences, settings, proposer
        self._counters = counters
        # By row: arrival of the sample that the counts belong to, and its counts.
        self._arrival = np.zeros(len(sequences.entries), dtype=np.int64)
        self._accepted, self._tried = np.zeros((2, len(sequences.entries)))

    def draft_limits(self, rows: Rows) -> Tokens:
        """Return the number int64[B] of tokens to propose for each of the decoding `rows`.

        Reading the weights takes as long as computing R tokens, so a step of B samples takes B + R units of
        time. One more draft token for each sample adds B units and the time to draft them. The result
        maximizes the expected tokens per unit of time.
        """
        sequences, batch = self._sequences, len(rows)
        room: Tokens = np.minimum(sequences.limit[rows] - sequences.length[rows] - 1, self._settings.tokens)
        if not self._settings.adaptive:
            return room
        new = rows[self._arrival[rows] != sequences.arrival[rows]]
        self._arrival[new] = sequences.arrival[new]
        self._accepted[new] = self._tried[new] = 0
        self._accepted[rows] *= _DECAY
        self._tried[rows] *= _DECAY
        rate = (self._accepted[rows] + _PRIOR_COUNTS[0]) / (self._tried[rows] + _PRIOR_COUNTS[1])
        cost = batch / (batch + _WEIGHT_READ_ROWS) + self._proposer.cost
        counts = np.arange(self._settings.tokens + 1)
        gain = np.cumsum(rate[:, None] ** counts, axis=1) / (1 + counts * cost)
        limits: Tokens = np.minimum(gain.argmax(axis=1), room)
        return limits

    def propose(self, rows: Rows, limits: Tokens) -> list[Proposal]:
        """Return proposals for those of `rows` that have draft tokens."""
        rows, limits = rows[limits > 0], limits[limits > 0]
        if not len(rows):
            return []
        drafted = self._proposer.propose(rows, limits)
        self._counters.proposed_tokens += sum(map(len, drafted))
        return [
            Proposal(row, tokens) for row, tokens in zip(rows.tolist(), drafted, strict=True) if len(tokens)
        ]

    def check_draft(self, proposal: Proposal, at: int) -> bool:
        """Return whether draft token `at` was accepted and the sample continues; count the result."""
        row = proposal.row
        if at >= len(proposal.tokens):
            return False
        accepted = bool(self._sequences.last_tokens(np.array([row]))[0] == proposal.tokens[at])
        self._tried[row] += 1
        self._accepted[row] += accepted
        self._counters.accepted_tokens += accepted
        return accepted and self._sequences.entries[row] is not None


class PromptLookup:
    """Proposes the tokens after the longest earlier occurrence of the last tokens; the latest if several."""

    cost = 0.0

    def __init__(self, sequences: Sequences, match: int) -> None:
        self._sequences, self._match = sequences, match

    def propose(self, rows: Rows, limits: Tokens) -> list[Tokens]:
        sequences = self._sequences
        return [
            find_continuation(sequences.tokens[row, : sequences.length[row]], count, self._match)
            for row, count in zip(rows.tolist(), limits.tolist(), strict=True)
        ]


def find_continuation(tokens: NDArray[np.int32], count: int, match: int) -> Tokens:
    """Return `count` tokens that may follow `tokens` int32[T]; an empty array without a match.

    A continuation that reaches the end of `tokens` is repeated, because such a text is periodic.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    length = 1
    while length < min(_MAX_MATCH_TOKENS, len(tokens)) and len(ends):
        longer = ends[(ends >= length) & (tokens[ends - length] == tokens[-1 - length])]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < match or not len(ends):
        return np.zeros(0, dtype=np.int64)
    return np.resize(tokens[ends[-1] + 1 :], count).astype(np.int64)
