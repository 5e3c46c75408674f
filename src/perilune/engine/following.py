"""Samples that are looked at token by token: for their text, a constraint, or further log-probs."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.engine.constraints import ConstraintState
from perilune.engine.request import Request, TopLogprobs
from perilune.engine.text import TextStream
from perilune.models.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Followed:
    """What is kept of one such sample.

    Attributes:
        text: None without a tokenizer.
        constraint: None without one.
        raw_logprobs, top_logprobs: of all tokens so far; None when not asked for.
    """

    text: TextStream | None
    constraint: ConstraintState | None
    raw_logprobs: list[float] | None
    top_logprobs: TopLogprobs | None

    @classmethod
    def begin(cls, request: Request, tokenizer: Tokenizer | None) -> Followed:
        """Before the first token that is to be sampled."""
        params = request.params
        own = request.token_ids[len(request.token_ids) - request.position :]
        return cls(
            text=None if tokenizer is None else TextStream(tokenizer, params.stop),
            constraint=None if request.constraint is None else request.constraint.start(own),
            raw_logprobs=[] if params.raw_logprobs else None,
            top_logprobs=[] if params.top_logprobs else None,
        )

    def take(self, token: int, *, is_stop: bool, may_stop: bool) -> bool:
        """Take the token that was drawn; whether its text ended the sample. Stop tokens are not text."""
        if self.constraint is not None:
            self.constraint.advance(token)
        if self.text is None or is_stop:
            return False
        self.text.push(token, may_stop=may_stop)
        return self.text.stopped


def needs_following(request: Request) -> bool:
    """Whether the samples of `request` cannot be left alone until they have ended."""
    params = request.params
    return bool(params.stop or params.raw_logprobs or params.top_logprobs or request.constraint)
