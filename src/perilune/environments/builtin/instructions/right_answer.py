"""Writes a plain text that satisfies the constraints of a request, so that each request can be satisfied."""

import json
import random
from collections.abc import Mapping
from typing import Any

from perilune.environments.builtin.instructions.constraints import to_words
from perilune.environments.builtin.instructions.vocabulary import LANGUAGES, SENTENCES

SHORT_ANSWER_WORDS = 15  # a shorter answer has only one sentence about the topic


def write_answer(topic: str, constraints: Mapping[str, Mapping[str, Any]], draw: random.Random) -> str:
    """Write a text about `topic` for `constraints`, which maps kinds to parameters. It may violate them."""
    required = _required_sentences(constraints)
    opening = [constraints["start"]["phrase"]] if "start" in constraints else []
    closing = [*required, *([constraints["end"]["phrase"]] if "end" in constraints else [])]
    pool = _topic_sentences(topic, constraints)
    draw.shuffle(pool)
    body = _choose_sentences(
        pool, len(opening) + len(closing), to_words(" ".join((*opening, *closing))), constraints
    )
    text = _format_text([*opening, *body, *closing], topic, constraints)
    if "lowercase" in constraints:
        return text.lower()
    return text.upper() if "uppercase" in constraints else text


def _required_sentences(constraints: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if "keywords" in constraints:
        return ["It also calls {first} and {second} to mind.".format(**constraints["keywords"])]
    if "frequency" in constraints:
        return [
            f"I say {' and '.join([constraints['frequency']['word']] * constraints['frequency']['count'])}."
        ]
    return []


def _topic_sentences(topic: str, constraints: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the sentences about the topic without the forbidden word."""
    if "language" in constraints:
        language = constraints["language"]
        return [template.format(topic=language["word"]) for template in LANGUAGES[language["language"]]]
    forbidden = constraints.get("forbidden", {}).get("word")
    return [text for template in SENTENCES if forbidden not in to_words(text := template.format(topic=topic))]


def _choose_sentences(
    sentences: list[str], others: int, other_words: list[str], constraints: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    for name in ("sentences", "bullets", "paragraphs"):
        if name in constraints:
            return sentences[: max(1, constraints[name]["count"] - others)]
    if constraints.get("max_words", {}).get("count", SHORT_ANSWER_WORDS + 1) <= SHORT_ANSWER_WORDS + len(
        other_words
    ):
        return sentences[:1]
    body = sentences[:2]
    while len(to_words(" ".join(body))) + len(other_words) < constraints.get("min_words", {}).get("count", 0):
        if len(body) == len(sentences):
            break
        body = sentences[: len(body) + 1]
    return body


def _format_text(lines: list[str], topic: str, constraints: Mapping[str, Mapping[str, Any]]) -> str:
    heading = constraints["language"]["word"] if "language" in constraints else topic
    if "bullets" in constraints:
        return "\n".join(f"- {line}" for line in lines)
    if "paragraphs" in constraints:
        return "\n\n".join(lines)
    text = " ".join(lines)
    if "json" in constraints:
        return json.dumps({"title": heading, "text": text}, ensure_ascii=False)
    return f"<<{heading}>>\n{text}" if "title" in constraints else text
