"""Writes a plain text that satisfies the constraints of a request, so that each request can be satisfied."""

import json
import random
from collections.abc import Mapping
from typing import Any

from perilune.environments.builtin.instructions.constraints import words
from perilune.environments.builtin.instructions.vocabulary import LANGUAGES, SENTENCES

SHORT = 15  # words below which an answer has one sentence of its own


def write_answer(topic: str, asked: Mapping[str, Mapping[str, Any]], draw: random.Random) -> str:
    """A text about `topic` that is meant to satisfy `asked`, which maps kinds to parameters. It may fail."""
    required = _required_sentence(asked)
    opening = [asked["start"]["phrase"]] if "start" in asked else []
    closing = [*required, *([asked["end"]["phrase"]] if "end" in asked else [])]
    pool = _pool(topic, asked)
    draw.shuffle(pool)
    body = _body(pool, len(opening) + len(closing), words(" ".join((*opening, *closing))), asked)
    text = _laid_out([*opening, *body, *closing], topic, asked)
    if "lowercase" in asked:
        return text.lower()
    return text.upper() if "uppercase" in asked else text


def _required_sentence(asked: Mapping[str, Mapping[str, Any]]) -> list[str]:
    if "keywords" in asked:
        return ["It also calls {first} and {second} to mind.".format(**asked["keywords"])]
    if "frequency" in asked:
        return [f"I say {' and '.join([asked['frequency']['word']] * asked['frequency']['count'])}."]
    return []


def _pool(topic: str, asked: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences about the topic without the forbidden word."""
    if "language" in asked:
        language = asked["language"]
        return [one.format(topic=language["word"]) for one in LANGUAGES[language["language"]]]
    forbidden = asked.get("forbidden", {}).get("word")
    return [text for one in SENTENCES if forbidden not in words(text := one.format(topic=topic))]


def _body(
    pool: list[str], others: int, other_words: list[str], asked: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    for name in ("sentences", "bullets", "paragraphs"):
        if name in asked:
            return pool[: max(1, asked[name]["count"] - others)]
    if asked.get("max_words", {}).get("count", SHORT + 1) <= SHORT + len(other_words):
        return pool[:1]
    body = pool[:2]
    while len(words(" ".join(body))) + len(other_words) < asked.get("min_words", {}).get("count", 0):
        if len(body) == len(pool):
            break
        body = pool[: len(body) + 1]
    return body


def _laid_out(lines: list[str], topic: str, asked: Mapping[str, Mapping[str, Any]]) -> str:
    heading = asked["language"]["word"] if "language" in asked else topic
    if "bullets" in asked:
        return "\n".join(f"- {line}" for line in lines)
    if "paragraphs" in asked:
        return "\n\n".join(lines)
    text = " ".join(lines)
    if "json" in asked:
        return json.dumps({"title": heading, "text": text}, ensure_ascii=False)
    return f"<<{heading}>>\n{text}" if "title" in asked else text
