"""The kinds of constraints, each with its parameters, request and check.

After IFEval (Zhou et al. 2023, arXiv:2311.07911), with stricter rules: an answer must be about the topic,
short, and more than an echo of the request, so that no text satisfies many requests at once.
"""

import json
import random
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.environments.builtin.instructions.vocabulary import (
    AVOIDED,
    CLOSINGS,
    FUNCTION_WORDS,
    KEYWORDS,
    LANGUAGES,
    OPENINGS,
    TOPICS,
)

Params = Mapping[str, Any]
MIN_NEW_WORDS = 3  # distinct words of an answer that the request does not have
MIN_DISTINCT_SHARE = 0.4  # share of an answer's words that are distinct
MIN_LETTERED_SHARE = 0.5  # share of an answer's words that have a letter
MIN_FUNCTION_WORD_SHARE = 0.15  # share of function words in a text of a language

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")


@dataclass(frozen=True, slots=True)
class ConstraintKind:
    """A kind of constraint.

    Attributes:
        excludes: two kinds that share one of these are never asked for together.
        template: the sentence that asks for it, with placeholders for its parameters.
        is_satisfied: returns whether a text satisfies it.
    """

    name: str
    excludes: frozenset[str]
    template: str
    draw: Callable[[random.Random], dict[str, Any]]
    is_satisfied: Callable[[str, Params], bool]


def to_words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


def count_sentences(text: str) -> int:
    """Return the number of sentences: parts with a letter or digit, up to a full stop, !, ? or the end."""
    ends = r"[.!?]+[\"'”’»)\]*_]*(?=\s|$)"
    return sum(bool(_WORD.search(part)) for part in re.split(ends, text))


def is_sound(text: str, request: str, topic_word: str, max_words: int) -> bool:
    """Return whether a text answers the request at all.

    Such a text mentions the topic and has at most `max_words` words. It is no echo of the request, no
    repetition and no list of numbers, contains no invisible characters, and mixes no alphabets in a word.
    """
    words = to_words(text)
    lettered = [word for word in words if any(map(str.isalpha, word))]
    return (
        any(word.startswith(topic_word) for word in words)
        and len(words) <= max_words
        and len(set(lettered) - set(to_words(request))) >= MIN_NEW_WORDS
        and len(set(words)) >= MIN_DISTINCT_SHARE * len(words)
        and len(lettered) >= MIN_LETTERED_SHARE * len(words)
        and all(len(_alphabets(word)) == 1 for word in lettered)
        and not any(
            unicodedata.category(letter) in ("Cf", "Cc", "Co", "Cs")
            for letter in text
            if letter not in "\n\t"
        )
    )


def _alphabets(word: str) -> set[str]:
    """Return the alphabets of a word's letters, such as LATIN and CYRILLIC."""
    return {unicodedata.name(letter, "").partition(" ")[0] for letter in word if letter.isalpha()}


def topic_stem(topic: str, language: str | None) -> str:
    """Return the beginning of the word that an answer must contain."""
    if language is not None:
        return TOPICS[topic][list(LANGUAGES).index(language)].lower()
    return topic.removesuffix("es" if topic == "volcanoes" else "s") if topic != "chess" else topic


def _is_bullets(text: str, params: Params) -> bool:
    lines = [line for line in text.strip().split("\n") if line.strip()]
    return len(lines) == params["count"] and all(re.match(r"- \S", line) and to_words(line) for line in lines)


def _is_json(text: str, params: Params) -> bool:
    pairs = _read_pairs(text)
    return sorted(key for key, _ in pairs) == ["text", "title"] and all(
        isinstance(value, str) and to_words(value) for _, value in pairs
    )


def _read_pairs(text: str) -> list[tuple[str, Any]]:
    """Return the keys and values of a JSON object; none if the text is no such object."""
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return []
    is_object = isinstance(pairs, list) and all(isinstance(pair, tuple) for pair in pairs)
    return pairs if is_object else []


def decode_json_text(text: str) -> str:
    """Return the keys and texts of a JSON object, without escapes such as \\n; any other text as it is."""
    pairs = [f"{key}: {value}" for key, value in _read_pairs(text) if isinstance(value, str)]
    return "\n".join(pairs) or text


def _has_title(text: str, params: Params) -> bool:
    first, _, rest = text.strip().partition("\n")
    title = re.fullmatch(r"<<([^<>]+)>>\s*", first)
    return title is not None and bool(to_words(title[1])) and bool(to_words(rest))


def _has_paragraphs(text: str, params: Params) -> bool:
    parts = re.split(r"\n[ \t]*\n", text.strip())
    return len(parts) == params["count"] and all(map(to_words, parts))


def _is_language(text: str, params: Params) -> bool:
    words, language = to_words(text), params["language"]
    if language == "Russian":
        letters = [letter for letter in text if letter.isalpha()]
        return sum("\u0400" <= letter <= "\u04ff" for letter in letters) >= 0.9 * len(letters) > 0
    counts = {name: sum(word in known for word in words) for name, known in FUNCTION_WORDS.items()}
    count = counts.pop(language)
    return count >= MIN_FUNCTION_WORD_SHARE * len(words) and count > max(counts.values())


def _starts_with_phrase(text: str, params: Params) -> bool:
    return re.match(re.escape(params["phrase"]) + r"(?:\s|$)", text.strip(), re.IGNORECASE) is not None


def _ends_with_phrase(text: str, params: Params) -> bool:
    return (
        re.search(r"(?:^|\s)" + re.escape(params["phrase"]) + r"\Z", text.strip(), re.IGNORECASE) is not None
    )


def _is_comma(letter: str) -> bool:
    is_mark = unicodedata.category(letter).startswith("P")
    return letter in ",\u201a" or (is_mark and "COMMA" in unicodedata.name(letter, ""))


def _draw_from(name: str, values: Sequence[Any]) -> Callable[[random.Random], dict[str, Any]]:
    return lambda draw: {name: draw.choice(values)}


KINDS: Mapping[str, ConstraintKind] = {
    name: ConstraintKind(name, frozenset(excludes.split()), ask, draw, holds)
    for name, excludes, ask, draw, holds in (
        (
            "min_words",
            "length",
            "Use at least {count} words.",
            _draw_from("count", (15, 20, 25, 30)),
            lambda text, p: len(to_words(text)) >= p["count"],
        ),
        (
            "max_words",
            "length",
            "Use fewer than {count} words.",
            _draw_from("count", (15, 20, 25)),
            lambda text, p: len(to_words(text)) < p["count"],
        ),
        (
            "sentences",
            "length layout",
            "Write exactly {count} sentences.",
            _draw_from("count", (2, 3, 4)),
            lambda text, p: count_sentences(text) == p["count"],
        ),
        (
            "keywords",
            "words",
            'Use the words "{first}" and "{second}".',
            lambda draw: dict(zip(("first", "second"), draw.sample(KEYWORDS, 2), strict=True)),
            lambda text, p: {p["first"], p["second"]} <= set(to_words(text)),
        ),
        (
            "forbidden",
            "words",
            'Do not use the word "{word}".',
            _draw_from("word", AVOIDED),
            lambda text, p: p["word"] not in to_words(text),
        ),
        (
            "frequency",
            "words",
            'Use the word "{word}" exactly {count} times.',
            lambda draw: {"word": draw.choice(KEYWORDS), "count": draw.randint(2, 4)},
            lambda text, p: to_words(text).count(p["word"]) == p["count"],
        ),
        (
            "bullets",
            "layout start end",
            'Answer with exactly {count} bullet points and nothing else. Each line starts with "- ".',
            _draw_from("count", (2, 3, 4)),
            _is_bullets,
        ),
        (
            "json",
            "layout start end case commas",
            'Answer with a JSON object and nothing else. It has the keys "title" and "text", both with text.',
            lambda draw: {},
            _is_json,
        ),
        (
            "title",
            "layout start",
            "Put a title on the first line, between << and >>.",
            lambda draw: {},
            _has_title,
        ),
        (
            "paragraphs",
            "layout",
            "Write exactly {count} paragraphs with a blank line between them.",
            _draw_from("count", (2, 3)),
            _has_paragraphs,
        ),
        (
            "lowercase",
            "case",
            "Use no capital letters.",
            lambda draw: {},
            lambda text, p: text == text.lower(),
        ),
        (
            "uppercase",
            "case",
            "Use capital letters only.",
            lambda draw: {},
            lambda text, p: text == text.upper(),
        ),
        (
            "no_commas",
            "commas",
            "Do not use commas.",
            lambda draw: {},
            lambda text, p: not any(map(_is_comma, text)),
        ),
        (
            "start",
            "start",
            "Begin with this sentence: {phrase}",
            _draw_from("phrase", OPENINGS),
            _starts_with_phrase,
        ),
        ("end", "end", "End with this sentence: {phrase}", _draw_from("phrase", CLOSINGS), _ends_with_phrase),
        (
            "language",
            "words start end",
            'Write in {language}, and use the word "{word}".',
            _draw_from("language", tuple(LANGUAGES)),
            _is_language,
        ),
    )
}
