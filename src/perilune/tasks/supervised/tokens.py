"""Rows of training data as token ids with a loss mask, and the rule for rows that are too long."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from perilune.data.chat_format import from_openai, read_content
from perilune.data.examples import (
    Comparison,
    Conversation,
    Example,
    Message,
    PlainText,
    read_comparison,
    read_demonstration,
)
from perilune.data.records import is_validation
from perilune.data.sources import Row, read_rows
from perilune.errors import RequestError
from perilune.files import sha256_bytes
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import encode_conversations, is_in_template
from perilune.plural import plural

CHUNK = 256  # rows that are tokenized together
EMPTY = "an empty answer"
EQUAL = "two equal answers"
MOST_CHECKED = 20_000  # rows whose tokens a plan counts

TooLong = Literal["error", "drop", "truncate"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One example as tokens.

    Attributes:
        prompt_ids: at least one token; without loss.
        token_ids: all tokens after the prompt.
        loss_mask: for each of `token_ids`, whether it is learned.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    loss_mask: list[bool]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass
class RowReader:
    """Reads rows as tokens, applies the rule for long rows, and counts.

    Attributes:
        max_length: most tokens of a row; None for as many as the model has positions.
        too_long: the rule for a longer row. A truncated row loses its end.
        rows, dropped, truncated: numbers of rows that were yielded, left out and truncated.
        tokens, learned, longest: numbers of tokens that were yielded, that have loss, and of the longest row.
        useless: the places of the rows that teach nothing, by reason.
    """

    tokenizer: Tokenizer
    positions: int
    max_length: int | None = None
    too_long: TooLong = "error"
    rows: int = 0
    dropped: int = 0
    truncated: int = 0
    tokens: int = 0
    learned: int = 0
    longest: int = 0
    useless: dict[str, list[str]] = field(default_factory=dict)
    _refused: list[tuple[str, int]] = field(default_factory=list)  # place and length

    def demonstrations(self, source: Iterable[Row]) -> Iterator[tuple[Row, Example, Tokens]]:
        """Yield the examples of an sft stage.

        Raises:
            RequestError: naming file and line, for a malformed row and one that the tokenizer cannot encode;
                at the end, for rows that are too long.
        """
        for rows in _chunks(source):
            examples = [read_demonstration(row) for row in rows]
            encoded = encode_examples(self.tokenizer, examples, [row.place for row in rows])
            for row, example, tokens in zip(rows, examples, encoded, strict=True):
                kept = self._fitting(row, tokens)
                if kept is not None:
                    self._count(kept)
                    if has_empty_answer(example):
                        self.useless.setdefault(EMPTY, []).append(row.place)
                    yield row, example, kept
        self._refuse_long_rows()

    def comparisons(self, source: Iterable[Row]) -> Iterator[tuple[Row, Comparison, Tokens, Tokens]]:
        """Yield the pairs of a stage that trains on preferences. They are never truncated.

        Raises:
            RequestError: as `demonstrations`, and when the prompt is empty.
        """
        for rows in _chunks(source):
            pairs = [read_comparison(row) for row in rows]
            sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
            encoded = encode_examples(self.tokenizer, sides, [row.place for row in rows for _ in range(2)])
            for row, pair, better, worse in zip(rows, pairs, encoded[::2], encoded[1::2], strict=True):
                if better.prompt_ids != worse.prompt_ids:
                    message = "the prompt is empty, or differs between the two answers"
                    raise RequestError(message, where=row.place)
                if self._fitting(row, max(better, worse, key=len)) is not None:
                    self._count(better)
                    self._count(worse)
                    self.rows -= 1  # a pair is one row
                    if better.token_ids == worse.token_ids:
                        self.useless.setdefault(EQUAL, []).append(row.place)
                    elif has_empty_answer(pair.chosen) or has_empty_answer(pair.rejected):
                        self.useless.setdefault(EMPTY, []).append(row.place)
                    yield row, pair, better, worse
        self._refuse_long_rows()

    def check(self, path: Path, *, pairs: bool, validation: float = 0.0) -> tuple[int, int]:
        """Check every row of a source, and count the tokens of the first `MOST_CHECKED`, which takes longer.

        Args:
            validation: share of the prompts or tasks that are held out.

        Returns:
            the number of rows, and how many of those whose tokens were counted are held out.

        Raises:
            RequestError: as `demonstrations` or `comparisons`, and when there are no rows.
        """
        rows = read_rows(path)
        first = islice(rows, MOST_CHECKED)
        if pairs:
            names = (pair.task_id for _, pair, *_ in self.comparisons(first))
        else:
            names = (split_name(example, tokens) for _, example, tokens in self.demonstrations(first))
        held_out = sum(is_validation(name, validation) for name in names)
        read: Callable[[Row], object] = read_comparison if pairs else read_demonstration
        total = self.rows + sum(1 for _ in map(read, rows))
        if not total:
            raise self.no_rows(path)
        if total == self.rows and (held_out == total or (validation and not held_out and not pairs)):
            raise uneven_split(total, held_out, validation, str(path))
        return total, held_out

    def no_rows(self, path: Path) -> RequestError:
        """Return the error for a source of which no row is left."""
        if not self.dropped:
            return RequestError("there are no rows to train on", where=str(path))
        what = f"there are no rows to train on: all {self.dropped:,} are longer than {self.limit:,} tokens"
        return RequestError(what, where=str(path), remedy="raise max_length, or shorten the rows")

    @property
    def limit(self) -> int:
        return min(self.max_length or self.positions, self.positions)

    def figures(self) -> dict[str, int]:
        """Return the counts, for a stage's summary."""
        names = ("rows", "dropped", "truncated", "tokens", "learned", "longest")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> str:
        rare = [f"{count:,} {name}" for name in ("dropped", "truncated") if (count := getattr(self, name))]
        parts = [plural(self.rows, "row"), *rare, f"{self.tokens:,} tokens, {self.learned:,} with loss"]
        return f"{', '.join(parts)}; the longest has {self.longest:,} of {self.limit:,}"

    def warnings(self) -> list[str]:
        """Return a sentence for each kind of row that teaches nothing."""
        return [
            f"{reason} in {len(places):,} of {plural(self.rows, 'row')}, first {Path(places[0]).name}"
            for reason, places in self.useless.items()
        ]

    def noted(self) -> dict[str, list[str]]:
        """Return the warnings for a stage's summary; empty without warnings."""
        return {"warnings": warnings} if (warnings := self.warnings()) else {}

    def _fitting(self, row: Row, tokens: Tokens) -> Tokens | None:
        """Return the row as it is used; None if it is left out."""
        if len(tokens) <= self.limit:
            return tokens
        if self.too_long == "error":
            self._refused.append((row.place, len(tokens)))
            return None
        room = max(0, self.limit - len(tokens.prompt_ids))
        mask = tokens.loss_mask[:room]
        if self.too_long == "drop" or not any(mask):
            self.dropped += 1
            return None
        self.truncated += 1
        return replace(tokens, token_ids=tokens.token_ids[:room], loss_mask=mask)

    def _count(self, tokens: Tokens) -> None:
        self.rows += 1
        self.tokens += len(tokens)
        self.learned += sum(tokens.loss_mask)
        self.longest = max(self.longest, len(tokens))

    def _refuse_long_rows(self) -> None:
        if not self._refused:
            return
        location, length = self._refused[0]
        bound = f"the model has {self.positions} positions"
        bound = bound if self.limit == self.positions else f"max_length is {self.limit}"
        more = len(self._refused) - 1
        others = f"; {more:,} more row{'s are' if more > 1 else ' is'} too long" if more else ""
        raise RequestError(
            f"the row has {length} tokens, and {bound}{others}",
            where=location,
            remedy="too_long: drop leaves out such rows, and in sft too_long: truncate keeps their start",
        )


def uneven_split(rows: int, held: int, validation: float, where: str) -> RequestError:
    """Return the error for a split whose one side is empty."""
    return RequestError(
        f"validation: {validation:g} holds out {held} of {plural(rows, 'row')} and leaves {rows - held} to"
        " train on",
        where=where,
        remedy="change validation, or add prompts: all rows of one prompt are on the same side",
    )


def split_name(example: Example, tokens: Tokens) -> str:
    """Return the name by which rows are held out together: of the prompt, or of a text without one."""
    is_text = isinstance(example, PlainText) and not example.prompt
    ids = [*tokens.prompt_ids, *tokens.token_ids] if is_text else tokens.prompt_ids
    return sha256_bytes(np.asarray(ids, np.int32).tobytes())


def has_empty_answer(example: Example) -> bool:
    """Return whether an answer that is trained on has no text."""
    if isinstance(example, PlainText):
        return not example.completion.strip()
    answers = [turn for turn in example.turns if turn["role"] == "assistant" and not turn.get("tool_calls")]
    return any(not read_content(turn.get("content"), "").strip() for turn in answers)


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows in lists. Tokenizing rows together takes a tenth of the time."""
    remaining = iter(rows)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk


def encode_examples(tokenizer: Tokenizer, examples: Sequence[Example], places: Sequence[str]) -> list[Tokens]:
    """Return the tokens of examples.

    Raises:
        RequestError: naming the place of the first example that the tokenizer or the chat template cannot
            encode, or of which no token would be learned.
    """
    try:
        chats = [_chat(tokenizer, example) for example in examples if isinstance(example, Conversation)]
        written = iter(encode_conversations(tokenizer, chats))
        encoded = [
            next(written) if isinstance(example, Conversation) else _plain_text(tokenizer, example)
            for example in examples
        ]
    except RequestError as error:
        if len(examples) == 1:
            raise RequestError(error.what, where=places[0], remedy=error.remedy) from None
        for example, place in zip(examples, places, strict=True):
            encode_examples(tokenizer, [example], [place])
        raise
    return [_tokens(*parts, place) for parts, place in zip(encoded, places, strict=True)]


def _tokens(prompt: list[int], tokens: list[int], mask: list[bool], place: str) -> Tokens:
    if not prompt:  # nothing predicts the first token
        prompt, tokens, mask = tokens[:1], tokens[1:], mask[1:]
    if not any(mask):
        raise RequestError("no token of the row would be learned", where=place, remedy="remove the row")
    return Tokens(prompt, tokens, mask)


def _plain_text(tokenizer: Tokenizer, example: PlainText) -> tuple[list[int], list[int], list[bool]]:
    prompt = tokenizer.encode_document(example.prompt) if example.prompt else []
    tokens = tokenizer.encode_document(example.completion, starts=not prompt, ends=True)
    return prompt, tokens, [True] * len(tokens)


def _chat(
    tokenizer: Tokenizer, example: Conversation
) -> tuple[Sequence[Message], Sequence[Message], Mapping[str, Any]]:
    """Return the conversation as the chat template can write it."""
    opening, turns = example.opening, example.turns
    if "tools" in example.variables and not is_in_template(tokenizer, "tools"):
        raise RequestError(
            "the model's chat template does not use the column 'tools'",
            remedy="set model.chat_template to one that describes tools, or remove the column",
        )
    has_calls = any("tool_calls" in message for message in (*opening, *turns))
    if has_calls and not is_in_template(tokenizer, "tool_calls"):
        return from_openai(list(opening)), from_openai(list(turns)), example.variables  # calls as text
    return opening, turns, example.variables
