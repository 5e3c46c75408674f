"""A second opinion on answers for audits. It shares no code with the checks that score."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from perilune.environments.builtin.instructions.vocabulary import FUNCTION_WORDS, LANGUAGES, TOPICS

Check = Callable[[str, list[str], Mapping[str, Any]], bool]


def satisfies_request(data: Mapping[str, Any], text: str) -> bool:
    """Return whether a text answers the request in `data` and satisfies all of its constraints."""
    raw = text = unicodedata.normalize("NFKC", text)
    constraints = data["asked"]
    if "json" in constraints and _is_json(raw, [], {}):
        fields = "\n".join(f"{key}: {field}" for key, field in json.loads(raw).items())
        text = unicodedata.normalize("NFKC", fields)
    words = list(_tokens(text))
    if not words or len(words) > data["words"]:
        return False
    request_words = set(_tokens(data["request"]))
    numbers = [word for word in words if not re.search(r"[^\W\d_]", word)]
    if len(set(words) - request_words - set(numbers)) < 3 or len(words) > 2.5 * len(set(words)):
        return False
    if 2 * len(numbers) > len(words) or any(map(_is_disguised, words)):
        return False
    if any(not (letter.isprintable() or letter in "\n\t\u00a0\u2028\u2029\u3000") for letter in text):
        return False
    topic = data["topic"]
    if "language" in constraints:
        topic_word = TOPICS[topic][[*LANGUAGES].index(constraints["language"]["language"])].casefold()
    else:
        topic_word = {"chess": "chess", "volcanoes": "volcano"}.get(topic, topic.rstrip("s"))
    if not any(word[: len(topic_word)] == topic_word for word in words):
        return False
    return all(
        _CHECKS[kind](raw if kind == "json" else text.strip(), words, params)
        for kind, params in constraints.items()
    )


def _tokens(text: str) -> Iterator[str]:
    """Yield words: runs of letters and digits, joined by single apostrophes and hyphens."""
    word = ""
    for index, letter in enumerate(text):
        following = text[index + 1 : index + 2]
        if letter.isalnum() or (word and letter in "'’-" and following.isalnum()):
            word += letter
        elif word:
            yield word.lower()
            word = ""
    if word:
        yield word.lower()


def _is_disguised(word: str) -> bool:
    """Return whether a word has letters of several alphabets."""
    names = [unicodedata.name(letter, "").split(" ") for letter in word if letter.isalpha()]
    return any(name[0] != names[0][0] for name in names)


def _count_sentences(text: str) -> int:
    count, open_words = 0, False
    for index, letter in enumerate(text):
        open_words = open_words or letter.isalnum()
        after = text[index + 1 :].lstrip(".!?").lstrip("\"'”’»)]*_")
        ends = not after or after[0].isspace()
        if letter in ".!?" and ends and open_words:
            count, open_words = count + 1, False
    return count + open_words


def _is_bullets(text: str, words: list[str], params: Mapping[str, Any]) -> bool:
    lines = [line for line in text.split("\n") if not line.isspace() and line]
    bullets = [line for line in lines if line[:2] == "- " and line[2:3].strip() and any(_tokens(line))]
    return bool(len(lines) == len(bullets) == params["count"])


def _is_json(text: str, words: list[str], params: Mapping[str, Any]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or set(value) != {"title", "text"}:
        return False
    repeated = any(len(re.findall(rf'"{key}"\s*:', text)) != 1 for key in value)
    return not repeated and all(isinstance(field, str) and any(_tokens(field)) for field in value.values())


def _has_title(text: str, words: list[str], params: Mapping[str, Any]) -> bool:
    lines = text.split("\n")
    first = lines[0].rstrip()
    inside = first[2:-2]
    framed = first[:2] == "<<" and first[-2:] == ">>" and len(first) > 4 and not set("<>") & set(inside)
    return framed and any(_tokens(inside)) and any(_tokens("\n".join(lines[1:])))


def _has_paragraphs(text: str, words: list[str], params: Mapping[str, Any]) -> bool:
    blocks, gap = [""], False
    for line in text.split("\n"):
        if not line.strip(" \t"):
            gap = True
            continue
        if gap:
            blocks.append("")
        gap = False
        blocks[-1] += line + "\n"
    return len(blocks) == params["count"] and all(any(_tokens(block)) for block in blocks)


def _is_language(text: str, words: list[str], params: Mapping[str, Any]) -> bool:
    if params["language"] == "Russian":
        letters = [unicodedata.name(letter, "") for letter in text if letter.isalpha()]
        cyrillic = [name for name in letters if name.startswith("CYRILLIC")]
        return bool(letters) and 10 * len(cyrillic) >= 9 * len(letters)
    shares = {name: len([w for w in words if w in common]) for name, common in FUNCTION_WORDS.items()}
    best = max(shares.values())
    leaders = [name for name, count in shares.items() if count == best]
    return leaders == [params["language"]] and best * 20 >= 3 * len(words)


def _starts_with_phrase(text: str, words: list[str], params: Mapping[str, Any]) -> bool:
    rest = text[len(params["phrase"]) :]
    is_equal = text[: len(params["phrase"])].casefold() == params["phrase"].casefold()
    return is_equal and (not rest or rest[0].isspace())


def _ends_with_phrase(text: str, words: list[str], params: Mapping[str, Any]) -> bool:
    before = text[: -len(params["phrase"])]
    is_equal = text[-len(params["phrase"]) :].casefold() == params["phrase"].casefold()
    return is_equal and (not before or before[-1].isspace())


_CHECKS: Mapping[str, Check] = {
    "min_words": lambda text, words, p: not len(words) < p["count"],
    "max_words": lambda text, words, p: len(words) <= p["count"] - 1,
    "sentences": lambda text, words, p: _count_sentences(text) == p["count"],
    "keywords": lambda text, words, p: p["first"] in words and p["second"] in words,
    "forbidden": lambda text, words, p: all(word != p["word"] for word in words),
    "frequency": lambda text, words, p: len([w for w in words if w == p["word"]]) == p["count"],
    "bullets": _is_bullets,
    "json": _is_json,
    "title": _has_title,
    "paragraphs": _has_paragraphs,
    "lowercase": lambda text, words, p: not any(letter.lower() != letter for letter in text),
    "uppercase": lambda text, words, p: not any(letter.upper() != letter for letter in text),
    "no_commas": lambda text, words, p: not set(text) & set(",‚،、⸲⸴⹁⹉⹌⹎"),
    "start": _starts_with_phrase,
    "end": _ends_with_phrase,
    "language": _is_language,
}
