"""Constrained output: samples that match a JSON schema, a regular expression or a list of choices.

The samples of a request share a `Constraint`, and each sample has its own `ConstraintState`. The engine uses
only these two protocols. llguidance (optional extra `constrained`) parses the grammars over the bytes of the
vocabulary. A token that the mask excludes has probability zero, and log-probs are under the masked
distribution.

V is the vocabulary size. A mask has W = ceil(V / 32) words: bit i of word w stands for token 32 w + i.
"""

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
"""Whitespace between the parts of JSON: none, a space, or a line break with indentation. JSON allows
unlimited whitespace, so a model could write it forever."""
JSON_OPTIONS = {"whitespace_pattern": _WHITESPACE}
"""The value of "x-guidance" in a schema of a grammar, so that its JSON has this whitespace."""
_MAX_GRAMMAR_ITEMS = 10_000
"""Most grammar items at one place: enough for about 2,500 optional properties, whose masks take 40 ms."""


class ConstraintState(Protocol):
    """The state of one sample in its constraint.

    Attributes:
        failure: why no token can follow, or "" if one can. Reasons are a required text that the vocabulary
            cannot express and a grammar that is too complex. The mask then allows only stop tokens, and the
            engine aborts the sample.
    """

    @property
    def failure(self) -> str: ...

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Write the bits of the tokens that may follow, including stop tokens, into int32[W]."""

    def advance(self, token_id: int) -> None:
        """Add the sampled token.

        Raises:
            RequestError: when the grammar has too many alternatives after this token.
            WorkFailedError: when the last mask did not allow this token.
        """


class Constraint(Protocol):
    """A grammar that the samples of one request must match.

    Attributes:
        stop_token_ids: tokens that end a complete sample; the engine stops at them too.
    """

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def start(self, token_ids: Sequence[int] = ()) -> ConstraintState:
        """Return the state after `token_ids`, for a new or a resumed sample."""


def mask_words(vocab_size: int) -> int:
    """Return W, the number of words of a mask for a vocabulary."""
    return -(-vocab_size // 32)


def mask_logits(logits: Tensor, masks: NDArray[np.int32]) -> Tensor:
    """Set logits float[B, V] to -inf in place where the masks int32[B, W] have no bit."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return logits.masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)


def format_alternatives(texts: Sequence[str]) -> str:
    """Return a grammar expression that matches one of the texts."""
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


class Constraints:
    """Creates constraints for one tokenizer.

    Args:
        tokenizer: the tokenizer of the model.
        vocab_size: vocabulary size of the model, which may exceed the tokenizer's.
        stop_token_ids: tokens that end a sample; by default the tokenizer's end-of-sequence token.

    Raises:
        RequestError: when llguidance is not installed, or the text of a token depends on its neighbors.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: Sequence[int] | None = None
    ) -> None:
        self._guidance = _import_llguidance()
        self._stop = tuple(stop_token_ids or (tokenizer.eos_token_id,))
        table = _TokenTable(tokenizer, vocab_size, self._stop)
        self._tokens = self._guidance.LLTokenizer(table, eos_token=list(self._stop))

    def json_schema(self, schema: Mapping[str, Any] | str) -> Constraint:
        """Return a constraint to JSON that matches a JSON Schema, given as an object or as text.

        Raises:
            RequestError: when the schema is malformed, or has a keyword that cannot be enforced, naming it.
        """
        try:
            document = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"not JSON: {error}", where="json_schema") from None
        if not isinstance(document, dict):
            raise RequestError(f"a schema is an object, not {document!r}", where="json_schema")
        grammar = self._guidance.LLMatcher.grammar_from_json_schema(document, overrides=JSON_OPTIONS)
        return self._compile(grammar, "json_schema")

    def grammar(self, rules: str) -> Constraint:
        """Return a constraint to the rule `start` of a grammar in llguidance's variant of Lark.

        Raises:
            RequestError: on a malformed grammar, or a schema in it that cannot be enforced.
        """
        return self._compile(_require_text(rules, "grammar"), "grammar")

    def nested_grammar(self, rules: str, answer: str) -> Constraint:
        """Return a constraint to the grammar `rules`, which refers to the grammar `answer` as `@answer`.

        Args:
            answer: a grammar in llguidance's variant of Lark, or in the GBNF of llama.cpp and xgrammar, whose
                first rule is `root`.

        Raises:
            RequestError: when `answer` is malformed.
        """
        gbnf = import_module("llguidance.gbnf_to_lark")
        try:
            lark = gbnf.any_to_lark(_require_text(answer, "grammar"))
        except RequestError:
            raise
        except Exception as error:  # of several kinds; RecursionError when it nests too deeply
            raise RequestError(f"malformed grammar: {error}", where="grammar") from None
        grammars = [{"lark_grammar": rules}, {"name": "answer", "lark_grammar": lark}]
        return self._compile(json.dumps({"grammars": grammars}), "grammar")

    def regex(self, pattern: str) -> Constraint:
        """Return a constraint to a regular expression without look-around and back-references.

        Raises:
            RequestError: on a malformed expression, with the position of the error.
        """
        grammar = self._guidance.LLMatcher.grammar_from_regex(_require_text(pattern, "regex"))
        return self._compile(grammar, "regex")

    def choice(self, options: Sequence[str]) -> Constraint:
        """Return a constraint to one of the texts.

        Raises:
            RequestError: when the list is empty, or the vocabulary cannot express a text.
        """
        if not options or isinstance(options, str):
            raise RequestError(f"{options!r} is not a list of at least one text", where="choice")
        texts = [_require_text(option, f"choice {index}") for index, option in enumerate(options)]
        return self._compile(f"start: {format_alternatives(texts)}", "choice")

    def _compile(self, grammar: str, where: str) -> Constraint:
        limits = self._guidance.LLParserLimits(max_items_in_row=_MAX_GRAMMAR_ITEMS)
        matcher = self._guidance.LLMatcher(self._tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(_error_message(matcher), where=where)
        constraint = _Grammar(matcher, self._stop)
        beginning = constraint.start()
        mask = np.zeros(mask_words(self._tokens.vocab_size), dtype=np.int32)
        beginning.fill_mask(mask)
        if beginning.failure:
            raise RequestError(beginning.failure, where=where)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
        # Check the limit on items early: after one token, an object allows all of its properties.
        beginning.advance(int(allowed.argmax()))
        return constraint


class _Grammar:
    """A compiled grammar. States are copies of its initial matcher."""

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
        self._ended = False  # after a stop token, which the matcher may not know

    @property
    def failure(self) -> str:
        return _error_message(self._matcher) if self._matcher.is_error() else ""

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
            if " items; max is " in self.failure:
                raise RequestError(
                    f"the grammar is too complex: {self.failure}",
                    where="constrained output",
                    remedy="use a schema with fewer optional properties or alternatives",
                )
            raise WorkFailedError(
                f"token {token_id} is not allowed here: {self.failure or 'the grammar is complete'}",
                where="constrained output",
            )


class _TokenTable:
    """The tokenizer interface of llguidance: the bytes of tokens, and the encoding of a forced text."""

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
        """Return the token ids of the longest prefix of `text` that the vocabulary can express."""
        try:
            return self._tokenizer.encode(text)
        except RequestError:
            if len(text) == 1:
                raise
            return self(text[:-1])


def _require_text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{value!r} is not a non-empty text", where=where)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise RequestError(f"{value!r} contains half of a surrogate pair", where=where)
    return value


def _error_message(matcher: Any) -> str:
    """Return the error message of the matcher, without the dump of its state."""
    message, _, _ = str(matcher.get_error()).partition("<state>")
    lines = message.strip().splitlines()
    if not lines or lines[0].startswith(("NoExtension", "panic")):
        return "the vocabulary cannot express the required text"
    return "; ".join([lines[0], *(line for line in lines[1:] if line.startswith("error: "))])


def _import_llguidance() -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise RequestError(
            "constrained output needs llguidance, which is not installed",
            remedy="pip install 'perilune[constrained]'",
        ) from None
