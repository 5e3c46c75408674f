"""Results of tools: JSON of bounded size, in which untrusted text is marked and harmless to display."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from perilune.errors import RequestError
from perilune.redaction import redact_document, redact_text
from perilune.terminal import escape_control

MAX_RESULT_CHARACTERS = 16_000  # characters of a result, about 5,000 tokens
SIZE_LIMITS = (  # items of a list or an object, and characters of a text, until a result fits
    *((500, 8000), (200, 4000), (100, 2000), (50, 1000), (20, 500)),
    *((10, 300), (5, 200), (3, 100), (2, 60), (1, 40)),
)
MAX_COPIED_CHARACTERS = 30 * MAX_RESULT_CHARACTERS  # characters to copy before a result counts as too large
MAX_ERROR_CHARACTERS = 4000
MAX_LEFT_OUT_NOTES = 12  # left-out places to name
UNTRUSTED_KEYS = frozenset(
    {"because", "conditions", "events", "failure", "message", "messages", "problem", "text", "warnings"}
)
"""Keys whose values may contain text of models, datasets, programs or users."""

FOLDED_KEYS = frozenset({"events", "correct_per_task", "implicit_objective", "length_dynamics"})
"""Keys of long values, which a result leaves out unless `part` asks for them."""

TIME_KEYS = frozenset({"submitted", "created", "ended", "time"})  # seconds since 1970

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e0fff]")


def mark_untrusted(value: Any) -> Any:
    """Copy `value`, with each value of the keys `UNTRUSTED_KEYS` below a key "untrusted"."""
    if isinstance(value, Mapping):
        return {
            str(key): {"untrusted": item}
            if key in UNTRUSTED_KEYS and item
            else item
            if key == "untrusted"
            else mark_untrusted(item)
            for key, item in value.items()
        }
    return [mark_untrusted(item) for item in value] if isinstance(value, list | tuple) else value


def render(document: Any, part: Sequence[str] = (), offset: int = 0) -> str:
    """Render a document, or a part of it, as JSON text of at most about `MAX_RESULT_CHARACTERS` characters.

    The last items of the longest outer list are left out until the result fits. Where that is not enough,
    inner lists, objects and texts are cut, too. "left_out" lists the place of each cut, its offset, and the
    full length.

    Args:
        part: keys and positions that lead to the part.
        offset: items, or characters, of the part to skip.

    Raises:
        RequestError: when there is no such part.
    """
    value, is_untrusted = _find_part(redact_document(document), part)
    for items, characters in SIZE_LIMITS:
        cut = _Truncator(items, characters)
        try:
            result = cut.value(value, tuple(part), offset)
        except OverflowError:
            continue
        if part or offset:
            result = {"part": list(part), "offset": offset, "untrusted" if is_untrusted else "value": result}
        if len(text := _render_json(result, cut.left_out)) <= MAX_RESULT_CHARACTERS or (
            text := _shorten(result, cut, len(text))
        ):
            break
    return text


def shorten_error(text: str) -> str:
    """Cut the middle out of an error that repeats a long argument; the remedy is at the end."""
    half = MAX_ERROR_CHARACTERS // 2
    text = escape_control(redact_text(text))
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:half]} … {text[-half:]}"


def _find_part(document: Any, part: Sequence[str]) -> tuple[Any, bool]:
    is_untrusted = False
    for index, key in enumerate(part):
        if isinstance(document, Mapping) and key in document:
            document = document[key]
        elif isinstance(document, list | tuple) and key in map(str, range(len(document))):
            document = document[int(key)]
        else:
            hint = "it ends there"
            if isinstance(document, Mapping):
                hint = f"it has {', '.join(map(str, document))}"
            elif isinstance(document, list | tuple):
                hint = f"it has {len(document)} items"
            raise RequestError(f"no part '{key}'", where=f"part {list(part[:index])}", remedy=hint)
        is_untrusted = is_untrusted or key == "untrusted"
        if (
            isinstance(document, Mapping)
            and document.keys() == {"untrusted"}
            and "untrusted" not in part[index:]
        ):
            document, is_untrusted = document["untrusted"], True
    return document, is_untrusted


def _render_json(shown: Any, left_out: Sequence[Mapping[str, Any]]) -> str:
    if left_out:
        more = len(left_out) - MAX_LEFT_OUT_NOTES
        notes = [*left_out[:MAX_LEFT_OUT_NOTES], *([{"more_places": more}] if more > 0 else [])]
        shown = {**shown, "left_out": notes}
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)


def _shorten(shown: dict[str, Any], cut: _Truncator, size: int) -> str:
    """Render the result without the last items of its largest outer list; "" if one item is too large."""
    outer = {len(_render_json(copy, ())): (copy, path, start, full) for copy, path, start, full in cut.outer}
    if not outer:
        return ""
    largest, path, start, full = outer[max(outer)]
    while len(largest) > 1 and size > MAX_RESULT_CHARACTERS - 200:  # the note about what is left out
        size -= len(_render_json(largest.pop(), ())) + 1
    note = {"part": list(path), "offset": start + len(largest), "of": full}
    cut.left_out = [entry for entry in cut.left_out if _is_shown(entry["part"], note)]
    text = _render_json(shown, [note, *cut.left_out])
    return text if len(text) <= MAX_RESULT_CHARACTERS else ""


def _is_shown(part: Sequence[str], note: Mapping[str, Any]) -> bool:
    """Return whether a part is still in a result whose list was cut at `note`."""
    depth = len(note["part"])
    within = list(part[:depth]) == note["part"]
    return not within or (len(part) > depth and int(part[depth]) < note["offset"])


class _Truncator:
    """Copies a value with at most `items` entries of each list and object, and `characters` of each text."""

    def __init__(self, items: int, characters: int) -> None:
        self._items = items
        self._characters = characters
        self.left_out: list[dict[str, Any]] = []
        self.outer: list[tuple[list[Any], tuple[str, ...], int, int]] = []
        """Lists that are in no other list: the copy, its path, the first position in it, and its length."""
        self._depth = 0  # number of lists around the current value
        self._copied = 0

    def value(self, value: Any, path: tuple[str, ...], offset: int = 0) -> Any:
        if isinstance(value, str):
            piece = self._take_slice(value, path, offset, self._characters)
            self._copied += len(piece)
            if self._copied > MAX_COPIED_CHARACTERS:
                raise OverflowError
            return _escape_invisible(piece)
        if isinstance(value, Mapping):
            keys = self._take_slice(list(value), path, offset, 2 * self._items)
            return {
                _escape_invisible(str(key)): _format_time(value[key])
                if key in TIME_KEYS and isinstance(value[key], float)
                else self.value(value[key], (*path, str(key)))
                for key in keys
                if not self._fold(key, value[key], path)
            }
        if isinstance(value, list | tuple):
            return self._copy_list(value, path, offset)
        if isinstance(value, float):
            return _round_number(value)
        return value

    def _fold(self, key: str, value: Any, path: tuple[str, ...]) -> bool:
        if isinstance(value, Mapping) and value.keys() == {"untrusted"}:
            value = value["untrusted"]
        if key not in FOLDED_KEYS or not value:
            return False
        self.left_out.append({"part": [*path, key], "offset": 0, "of": len(value)})
        return True

    def _copy_list(self, value: Sequence[Any], path: tuple[str, ...], offset: int) -> list[Any]:
        piece = self._take_slice(value, path, offset, self._items)
        self._depth += 1
        copy = [self.value(item, (*path, str(index))) for index, item in enumerate(piece, offset)]
        self._depth -= 1
        if not self._depth:
            self.outer.append((copy, path, offset, len(value)))
        return copy

    def _take_slice(self, value: Any, path: tuple[str, ...], offset: int, most: int) -> Any:
        piece = value[offset : offset + most]
        if offset + len(piece) < len(value):
            self.left_out.append({"part": list(path), "offset": offset + len(piece), "of": len(value)})
        return piece


def _round_number(value: float) -> float | None:
    """Round to seven significant digits; times since 1970 keep theirs."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.7g}") if abs(value) < 1e6 else value


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _escape_invisible(text: str) -> str:
    return _INVISIBLE.sub(lambda match: f"\\u{{{ord(match[0]):x}}}", escape_control(text))
