"""Constrained output: which tokens a sample may say next, so that the whole fits a schema, pattern or list.

The engine knows two small protocols. A `Constraint` belongs to a request and is shared by its samples; each
of them runs its own `ConstraintState`. Grammars are read by llguidance (optional extra `constrained`), a
parser over the bytes of the vocabulary. What a mask forbids has probability zero, and log-probs are those of
the distribution that is left.

V vocabulary, W = ceil(V / 32) words of a mask: bit i of word w stands for token 32 w + i.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.errors import RequestError, WorkFailedError
from perilune.models.text.tokenizer import Tokenizer

_WHITESPACE = r"( |\n[ \t]{0,16})?"
"""What may stand between the parts of JSON: nothing, a space, or a line's end with its indentation. With any
whitespace whatever, as JSON has it, a model can go on with it for ever."""
_MOST_ITEMS = 10_000
"""Most grammar items at one place: an object with some 2,500 optional properties, whose masks take 40 ms."""


class ConstraintState(Protocol):
    """Where one sample stands in its constraint.

    Attributes:
        complete: nothing but a stop token may follow.
        failed: why no token may follow, or "": the vocabulary cannot express what must come next, or the
            grammar took too much to read. The sample is to be aborted; masks then allow a stop token.
    """

    @property
    def complete(self) -> bool: ...

    @property
    def failed(self) -> str: ...

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Write the bits of the tokens that may follow, stop tokens included, into int32[W]."""

    def advance(self, token_id: int) -> None:
        """Take the token that was sampled.

        Raises:
            RequestError: when the grammar has too many alternatives from here on.
            WorkFailedError: when the last mask did not allow it.
        """

    def rollback(self, tokens: int) -> None:
        """Forget the last `tokens` tokens."""


class Constraint(Protocol):
    """What the answers to one request must look like.

    Attributes:
        stop_token_ids: the tokens that end a complete answer; the engine stops on them too.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def start(self, token_ids: Sequence[int] = ()) -> ConstraintState:
        """The state after `token_ids`: of a new sample, or of one that is computed again."""


def mask_words(vocab_size: int) -> int:
    """W of a vocabulary."""
    return -(-vocab_size // 32)


def forbid(logits: Tensor, masks: NDArray[np.int32]) -> Tensor:
    """The logits float[B, V] with -inf wherever int32[B, W] has no bit, changed in place."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)


class Constraints:
    """Makes constraints for one tokenizer, whose table of bytes is built once.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, which may have more rows than the tokenizer has tokens.
        stop_token_ids: what ends an answer; by default the tokenizer's end-of-sequence token.

    Raises:
        RequestError: when llguidance is not installed, or the tokenizer's tokens have no bytes of their own.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int] | None = None
    ) -> None:
        self._guidance = _llguidance()
        self._stop = tuple(stop_token_ids or (tokenizer.eos_token_id,))
        table = _TokenTable(tokenizer, vocab_size, self._stop)
        self._tokens = self._guidance.LLTokenizer(table, eos_token=list(self._stop))

    def json_schema(self, schema: Mapping[str, Any] | str) -> Constraint:
        """JSON that fits a JSON Schema, given as a document or as its text.

        Raises:
            RequestError: on a malformed schema, or one with keywords that cannot be enforced, named.
        """
        try:
            document = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"not JSON: {error}", where="json_schema") from None
        if not isinstance(document, dict):
            raise RequestError(f"a schema is an object, not {document!r}", where="json_schema")
        options = {"whitespace_pattern": _WHITESPACE}
        grammar = self._guidance.LLMatcher.grammar_from_json_schema(document, overrides=options)
        return self._constraint(grammar, "json_schema")

    def regex(self, pattern: str) -> Constraint:
        """Text that a regular expression matches as a whole; no look-around, no back-references.

        Raises:
            RequestError: on a malformed expression, saying where in it.
        """
        grammar = self._guidance.LLMatcher.grammar_from_regex(_text(pattern, "regex"))
        return self._constraint(grammar, "regex")

    def choice(self, options: Sequence[str]) -> Constraint:
        """One of the texts.

        Raises:
            RequestError: when there is none, or one that the vocabulary cannot express.
        """
        if not options or isinstance(options, str):
            raise RequestError(f"{options!r} is no list of texts", where="choice")
        texts = [_text(option, f"choice {index}") for index, option in enumerate(options)]
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return self._constraint(f"start: {alternatives}", "choice")

    def _constraint(self, grammar: str, where: str) -> Constraint:
        limits = self._guidance.LLParserLimits(max_items_in_row=_MOST_ITEMS)
        matcher = self._guidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(_reason(matcher), where=where)
        constraint = _Grammar(matcher, self._stop)
        beginning = constraint.start()
        mask = np.zeros(mask_words(self._tokens.vocab_size), dtype=np.int32)
        beginning.fill_mask(mask)
        if beginning.failed:
            raise RequestError(beginning.failed, where=where)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
        beginning.advance(int(allowed.argmax()))  # one token on, an object offers all of its properties
        return constraint


class _Grammar:
    """A compiled grammar; states are copies of its matcher at the beginning."""

    def __init__(self, matcher: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._matcher = matcher
        self.stop_token_ids = stop_token_ids

    def start(self, token_ids: Sequence[int] = ()) -> ConstraintState:
        state = _MatcherState(self._matcher.deep_copy(), self.stop_token_ids)
        for token in token_ids:
            state.advance(token)
        return state


class _MatcherState:
    def __init__(self, matcher: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._matcher, self._stop = matcher, stop_token_ids
        self._ended = False  # by a stop token, of which the matcher need not know

    @property
    def complete(self) -> bool:
        return self._ended or (bool(self._matcher.is_stopped()) and not self.failed)

    @property
    def failed(self) -> str:
        return _reason(self._matcher) if self._matcher.is_error() else ""

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        allowed = self._matcher.compute_bitmask()
        if self._ended or self._matcher.is_error():
            mask[:] = 0
            for token in self._stop:
                mask.view(np.uint8)[token // 8] |= 1 << token % 8
        else:
            mask[:] = np.frombuffer(allowed, dtype=np.int32)[: len(mask)]

    def advance(self, token_id: int) -> None:
        if token_id in self._stop and (self._matcher.is_accepting() or self._matcher.is_error()):
            self._ended = True
        elif self._ended or not self._matcher.consume_token(int(token_id)):
            if " items; max is " in self.failed:
                raise RequestError(
                    f"the grammar is too complex: {self.failed}",
                    where="constrained output",
                    remedy="use a schema with fewer optional properties or alternatives",
                )
            raise WorkFailedError(
                f"token {token_id} may not follow: {self.failed or 'the end was reached'}",
                where="constrained output",
            )

    def rollback(self, tokens: int) -> None:
        taken = tokens - self._ended
        self._ended = False
        if not self._matcher.rollback(taken):
            raise WorkFailedError(self.failed, where="constrained output")


class _TokenTable:
    """What llguidance asks of a tokenizer: the bytes of its tokens, and how it splits a forced text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop: tuple[int, ...]) -> None:
        table = tokenizer.token_bytes()[:vocab_size]
        table += [None] * (vocab_size - len(table))
        self.eos_token_id = stop[0]
        self.special_token_ids = [index for index, text in enumerate(table) if text is None or index in stop]
        named = ((b"[%d]" % index) for index in range(vocab_size))
        self.tokens = [name if text is None else text for text, name in zip(table, named, strict=True)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Token ids of the longest beginning of `text` that the vocabulary can express."""
        try:
            return self._tokenizer.encode(text)
        except RequestError:
            if len(text) == 1:
                raise
            return self(text[:-1])


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{value!r} is no text", where=where)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RequestError(f"{value!r} holds half of a surrogate pair", where=where)
    return value


def _reason(matcher: Any) -> str:
    """What the matcher complains of, without the state that it adds."""
    message, _, _ = str(matcher.get_error()).partition("<state>")
    lines = message.strip().splitlines()
    if not lines or lines[0].startswith(("NoExtension", "panic")):
        return "the vocabulary cannot express what must come next"
    return "; ".join([lines[0], *(line for line in lines[1:] if line.startswith("error: "))])


def _llguidance() -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise RequestError(
            "constrained output needs llguidance, which is not installed",
            remedy="pip install 'perilune[constrained]'",
        ) from None
