"""Tokens of mathematical answers in LaTeX or plain text."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_SYMBOLS = str.maketrans({
    **dict.fromkeys("−–", "-"), **dict.fromkeys("×·⋅∗", "*"), **dict.fromkeys("÷∕", "/"), "π": r"\pi ",
    "√": r"\sqrt ", "∞": r"\infty ", "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ",
    "∈": r"\in ", "±": r"\pm ", "∅": r"\emptyset ", "½": r"\frac{1}{2}", "²": "^{2}", "³": "^{3}", '"': " ",
})  # fmt: skip
_LAYOUT = "left|right|[bB]igg?[lrm]?|displaystyle|textstyle|quad|qquad|boxed"
_TEXT = "text[a-z]*|math(?:rm|bf|sf|it)|mbox|operatorname"
_NAMES = "sinh|cosh|tanh|sin|cos|tan|log|ln|exp|pi|infty"
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=\d)(?:\{,\}|\\[,!]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", ""),
        (r"\\\\", r" \\cr "),
        (rf"\\(?:{_TEXT})\s*\{{([^{{}}\\]*)\}}", r' "\1" '),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))", ' "degrees" '),
        (rf"\\(?:{_LAYOUT})(?![a-zA-Z])\.?|\\[\]\[$(),:; !]|[$~]", " "),
        (r"\\[dtc]?frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)(?=\s*[\d{\\])", r"\\frac{\1}"),
        (r"\\(?:cdot|times|ast)(?![a-zA-Z])|(?<!\*)\*(?!\*)", " * "),
        (r"\\(l|g)(?:eq|eqslant)(?![a-zA-Z])", r"\\\1e"),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset"),
        (r"([<>])=", lambda match: r"\le " if match[1] == "<" else r"\ge "),
        (r"\*\*", "^"),
        (r"_\s*\{\s*(\w+)\s*\}", r"_\1 "),
        (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])", r"\1*10^{\2}"),
        (r"\\(?=%)", ""),
        (rf"(?<![\\a-zA-Z])(sqrt(?=\W)|(?:{_NAMES})(?![a-zA-Z]))", r"\\\1"),
    )
)
_WORD = "[^\\W\\d_]{4,}|(?:cm|mm|km|kg|mg|ml|ft|in|hr|hrs|min|sec|mph|or|and)(?![^\\W\\d_])"
_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_OTHERS = rf'|(?P<quoted>"[^"]*")|(?P<word>{_WORD})|(?P<symbol>\\[a-zA-Z]+|\\.|\S)'
_TOKEN = re.compile(
    rf"(?P<number>(?:[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+(?![,\d])(?:\.[0-9]+)?)|{_NUMBER}){_OTHERS}", re.DOTALL
)
_TOKEN_IN_BRACKETS = re.compile(rf"(?P<number>{_NUMBER}){_OTHERS}", re.DOTALL)


class Token(NamedTuple):
    """A token of kind "number" (digits without separators), "word" (in lower case) or "symbol"."""

    kind: str
    text: str


def tokenize(text: str) -> list[Token]:
    """Return the tokens of an answer, without layout. A comma in brackets never separates thousands."""
    text = text.translate(_SYMBOLS)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return list(_scan(text.strip().removesuffix(".")))


def _scan(text: str) -> Iterator[Token]:
    depth = position = 0
    while match := (_TOKEN_IN_BRACKETS if depth else _TOKEN).search(text, position):
        position = match.end()
        kind, word = str(match.lastgroup), match[0]
        if kind == "quoted":
            inside = word[1:-1].lower().split()
            is_letter = len("".join(inside).strip("()")) < 2
            yield from _scan(word[1:-1]) if is_letter else (Token("word", word_part) for word_part in inside)
        elif kind == "number":
            yield Token(kind, word.replace(",", ""))
        else:
            depth += (word in ("(", "[", r"\{")) - (word in (")", "]", r"\}"))
            yield Token(kind, word.lower() if kind == "word" else word)
