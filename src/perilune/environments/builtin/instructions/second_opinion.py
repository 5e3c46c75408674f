"""A second opinion on answers for audits. It shares no code with the checks that score."""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from perilune.environments.builtin.instructions.vocabulary import FUNCTION_WORDS, LANGUAGES, TOPICS

Check = Callable[[str, list[str], Mapping[str, Any]], bool]


def satisfies(data: Mapping[str, Any], text: str) -> bool:
    """Whether a text answers the request in `data` and satisfies all of its constraints."""
    text = unicodedata.normalize("NFKC", text)
    found = list(_tokens(text))
    asked = data["asked"]
    if not found or len(found) > data["words"]:
        return False
    known = set(_tokens(data["request"]))
    numbers = [word for word in found if not re.search(r"[^\W\d_]", word)]
    if len(set(found) - known - set(numbers)) < 3 or len(found) > 2.5 * len(set(found)):
        return False
    if 2 * len(numbers) > len(found) or any(map(_is_disguised, found)):
        return False
    if any(not (letter.isprintable() or letter in "\n\t\u00a0\u2028\u2029\u3000") for letter in text):
        return False
    topic = data["topic"]
    if "language" in asked:
        wanted = TOPICS[topic][[*LANGUAGES].index(asked["language"]["language"])].casefold()
    else:
        wanted = {"chess": "chess", "volcanoes": "volcano"}.get(topic, topic.rstrip("s"))
    if not any(word[: len(wanted)] == wanted for word in found):
        return False
    return all(_CHECKS[kind](text.strip(), found, params) for kind, params in asked.items())


def _tokens(text: str) -> Iterator[str]:
    """Words: runs of letters and digits, joined by single apostrophes and hyphens."""
    word = ""
    for place, letter in enumerate(text):
        following = text[place + 1 : place + 2]
        if letter.isalnum() or (word and letter in "'’-" and following.isalnum()):
            word += letter
        elif word:
            yield word.lower()
            word = ""
    if word:
        yield word.lower()


def _is_disguised(word: str) -> bool:
    """Whether letters of several alphabets stand in one word."""
    names = [unicodedata.name(letter, "").split(" ") for letter in word if letter.isalpha()]
    return any(name[0] != names[0][0] for name in names)


def _sentence_count(text: str) -> int:
    count, open_words = 0, False
    for place, letter in enumerate(text):
        open_words = open_words or letter.isalnum()
        after = text[place + 1 :].lstrip(".!?").lstrip("\"'”’»)]*_")
        ends = not after or after[0].isspace()
        if letter in ".!?" and ends and open_words:
            count, open_words = count + 1, False
    return count + open_words


def _bullets(text: str, found: list[str], params: Mapping[str, Any]) -> bool:
    lines = [line for line in text.split("\n") if not line.isspace() and line]
    good = [line for line in lines if line[:2] == "- " and line[2:3].strip() and any(_tokens(line))]
    return bool(len(lines) == len(good) == params["count"])


def _json(text: str, found: list[str], params: Mapping[str, Any]) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict) or set(value) != {"title", "text"}:
        return False
    repeated = any(len(re.findall(rf'"{key}"\s*:', text)) != 1 for key in value)
    return not repeated and all(isinstance(one, str) and any(_tokens(one)) for one in value.values())


def _title(text: str, found: list[str], params: Mapping[str, Any]) -> bool:
    lines = text.split("\n")
    first = lines[0].rstrip()
    inside = first[2:-2]
    framed = first[:2] == "<<" and first[-2:] == ">>" and len(first) > 4 and not set("<>") & set(inside)
    return framed and any(_tokens(inside)) and any(_tokens("\n".join(lines[1:])))


def _paragraphs(text: str, found: list[str], params: Mapping[str, Any]) -> bool:
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


def _language(text: str, found: list[str], params: Mapping[str, Any]) -> bool:
    if params["language"] == "Russian":
        letters = [unicodedata.name(one, "") for one in text if one.isalpha()]
        cyrillic = [name for name in letters if name.startswith("CYRILLIC")]
        return bool(letters) and 10 * len(cyrillic) >= 9 * len(letters)
    shares = {name: len([w for w in found if w in common]) for name, common in FUNCTION_WORDS.items()}
    best = max(shares.values())
    leaders = [name for name, count in shares.items() if count == best]
    return leaders == [params["language"]] and best * 20 >= 3 * len(found)


def _begins(text: str, found: list[str], params: Mapping[str, Any]) -> bool:
    rest = text[len(params["phrase"]) :]
    same = text[: len(params["phrase"])].casefold() == params["phrase"].casefold()
    return same and (not rest or rest[0].isspace())


def _finishes(text: str, found: list[str], params: Mapping[str, Any]) -> bool:
    before = text[: -len(params["phrase"])]
    same = text[-len(params["phrase"]) :].casefold() == params["phrase"].casefold()
    return same and (not before or before[-1].isspace())


_CHECKS: Mapping[str, Check] = {
    "min_words": lambda text, found, p: not len(found) < p["count"],
    "max_words": lambda text, found, p: len(found) <= p["count"] - 1,
    "sentences": lambda text, found, p: _sentence_count(text) == p["count"],
    "keywords": lambda text, found, p: p["first"] in found and p["second"] in found,
    "forbidden": lambda text, found, p: all(word != p["word"] for word in found),
    "frequency": lambda text, found, p: len([w for w in found if w == p["word"]]) == p["count"],
    "bullets": _bullets,
    "json": _json,
    "title": _title,
    "paragraphs": _paragraphs,
    "lowercase": lambda text, found, p: not any(one.lower() != one for one in text),
    "uppercase": lambda text, found, p: not any(one.upper() != one for one in text),
    "no_commas": lambda text, found, p: not set(text) & set(",‚،、⸲⸴⹁⹉⹌⹎"),
    "start": _begins,
    "end": _finishes,
    "language": _language,
}
