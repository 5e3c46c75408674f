"""Conditions that choose episodes, such as `reward_terms.format < 1 and (truncated or not failure)`.

    condition  = any ("or" any)*
    any        = one ("and" one)*
    one        = "not" one | "(" condition ")" | name [operator value]
    operator   = "<" | "<=" | ">" | ">=" | "==" | "!=" | "~" (contains)
    value      = number | "text" | 'text' | true | false | name

Conditions never reach Python's `eval`. A comparison with a figure that an episode lacks is false.
"""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from perilune.data.episode import Episode
from perilune.errors import RequestError

Value = float | str | bool | None
Condition = Callable[[Episode], bool]
_Term = Callable[[Episode], Value]

FIELDS: Mapping[str, _Term] = {
    "reward": lambda episode: episode.reward,
    "failure": lambda episode: episode.failure,
    "finish_reason": lambda episode: episode.finish_reason,
    "truncated": lambda episode: episode.truncated,
    "environment": lambda episode: episode.environment,
    "task_id": lambda episode: episode.task_id,
    "episode_id": lambda episode: episode.episode_id,
    "text": lambda episode: episode.text,
    "step": lambda episode: float(episode.episode_id.partition("/")[0]),
    "tokens": lambda episode: float(len(episode.prompt_ids) + len(episode.token_ids)),
    "sampled": lambda episode: float(episode.sampled),
}
GROUPS = ("reward_terms", "metrics")  # mappings of an episode: reward_terms.NAME
_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)|(?P<text>\"[^\"]*\"|'[^']*')"
    r"|(?P<sign><=|>=|==|!=|[<>~()])|(?P<name>[A-Za-z_][\w./@-]*))"
)
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_LITERALS: Mapping[str, Value] = {"true": True, "false": False}
_MAX_DEPTH = 50  # nested parentheses and negations


def parse_where(text: str) -> Condition:
    """Return the condition that `text` states. An empty text is true of every episode.

    Raises:
        RequestError: naming the part of the text that is not understood.
    """
    if not text.strip():
        return lambda _: True
    parser = _Parser(text, _tokenize(text))
    condition = parser.either(0)
    if parser.tokens:
        raise parser.error(f"'{parser.tokens[0][1]}' does not continue the condition")
    return lambda episode: bool(condition(episode))


def _tokenize(text: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise RequestError(f"cannot read {text[position:].strip()[:40]!r}", where="--where")
        kind = match.lastgroup or ""
        tokens.append((kind, match[kind]))
        position = match.end()
    return tokens


@dataclass
class _Parser:
    """A recursive-descent parser, which takes tokens from the front of the list."""

    text: str
    tokens: list[tuple[str, str]]

    def either(self, depth: int) -> _Term:
        terms = [self.both(depth)]
        while self.take("or"):
            terms.append(self.both(depth))
        return terms[0] if len(terms) == 1 else lambda episode: any(term(episode) for term in terms)

    def both(self, depth: int) -> _Term:
        terms = [self.one(depth)]
        while self.take("and"):
            terms.append(self.one(depth))
        return terms[0] if len(terms) == 1 else lambda episode: all(term(episode) for term in terms)

    def one(self, depth: int) -> _Term:
        if depth > _MAX_DEPTH:
            raise self.error("it is nested too deeply")
        if self.take("not"):
            inner = self.one(depth + 1)
            return lambda episode: not inner(episode)
        if self.take("("):
            inner = self.either(depth + 1)
            if not self.take(")"):
                raise self.error("a parenthesis is not closed")
            return inner
        left = self.value()
        if not self.tokens or self.tokens[0][1] not in {*_OPERATORS, "~"}:
            return left
        sign, right = self.tokens.pop(0)[1], self.value()
        return lambda episode: _compare_values(sign, left(episode), right(episode))

    def value(self) -> _Term:
        if not self.tokens:
            raise self.error("it ends too early")
        kind, text = self.tokens.pop(0)
        match kind:
            case "number":
                number = float(text)
                return lambda _: number
            case "text":
                return lambda _: text[1:-1]
            case "name":
                return self.field(text)
        raise self.error(f"'{text}' stands where a name or a value is expected")

    def field(self, name: str) -> _Term:
        group, _, key = name.partition(".")
        if name in _LITERALS:
            word = _LITERALS[name]
            return lambda _: word
        if group in GROUPS and key:
            return lambda episode: getattr(episode, group).get(key)
        if name in FIELDS:
            return FIELDS[name]
        known = ", ".join((*FIELDS, *(f"{mapping}.NAME" for mapping in GROUPS)))
        raise RequestError(f"episodes have no '{name}'", where="--where", remedy=f"one of: {known}")

    def take(self, word: str) -> bool:
        if self.tokens and self.tokens[0][0] in ("name", "sign") and self.tokens[0][1] == word:
            self.tokens.pop(0)
            return True
        return False

    def error(self, problem: str) -> RequestError:
        return RequestError(f"{self.text!r}: {problem}", where="--where")


def _compare_values(sign: str, left: Value, right: Value) -> bool:
    if left is None or right is None:
        return False
    if sign == "~":
        return str(right) in str(left)
    if isinstance(left, str) != isinstance(right, str):
        return sign == "!="
    return _OPERATORS[sign](left, right)
