"""Reads YAML and records the line of every value.

Accepts only values of JSON: mappings with text keys, lists, text, numbers, true, false and null. Words such
as `yes` and `no` are text. Aliases, merge keys and tags are refused, so a small file stays a small document.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from perilune.errors import RequestError

MAX_BYTES = 1 << 18
MAX_DEPTH = 64
MAX_DIGITS = 32  # characters of an integer
KeyPath = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_TOO_DEEP = "sections are nested too deeply"


@dataclass
class Document:
    """A value, and the location of every path inside it ("recipe.yaml:12" or "--set seed=1")."""

    value: Any
    locations: dict[KeyPath, str] = field(default_factory=dict)

    def locate(self, path: Sequence[str | int]) -> str:
        """Return the location of the value at `path`, or of the closest section around it."""
        for length in range(len(path), -1, -1):
            if (location := self.locations.get(tuple(path[:length]))) is not None:
                return location
        return ""

    def set(self, path: KeyPath, value: Any, location: str) -> None:
        """Replace the value at `path`, and create missing sections on the path.

        Raises:
            RequestError: when a value on the path is not a section.
        """
        if len(path) > MAX_DEPTH:
            raise RequestError(_TOO_DEEP, where=location)
        walk: list[Any] = [self.value]
        for depth, key in enumerate(path):
            section = walk[-1]
            container: type[Any] = list if isinstance(key, int) else dict
            if not isinstance(section, container):
                named, remedy = dotted(path[:depth]), ""
                written = json.dumps(section, ensure_ascii=False)
                if depth > 2 and path[0] == "stages":
                    named = dotted((self.value["stages"][path[1]]["name"], *path[2:depth]))
                    if isinstance(section, str):
                        remedy = f"--set '{named}={{name: {section}, {key}: {json.dumps(value)}}}'"
                what = f"{named} is {written}, not a section with keys"
                raise RequestError(what, where=location, remedy=remedy)
            if container is dict and key not in section:
                section[key] = {}
                self.locations[path[: depth + 1]] = location
            walk.append(section[key])
        walk[-2][path[-1]] = value
        self.locations = {old: source for old, source in self.locations.items() if old[: len(path)] != path}
        self.locations[path] = location


def dotted(path: Sequence[str | int]) -> str:
    """Return `("stages", 2, "steps")` as "stages.2.steps"."""
    return ".".join(str(part) for part in path)


def parse_yaml(text: str, name: str) -> Document:
    """Parse the YAML in `text`; `name` is its name in messages.

    Raises:
        RequestError: when the text is too large or malformed, or has a value that JSON cannot express.
    """
    require_characters(text, name)
    if len(text.encode()) > MAX_BYTES:
        raise RequestError(f"is larger than {MAX_BYTES // 1024} KiB", where=name)
    try:
        node = yaml.compose(text, Loader=_Loader)
        document = Document(None)
        document.value = _build(node, (), name, document.locations) if node is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = error.problem or error.context or ""
        if r"'\t'" in problem:
            raise RequestError("not valid YAML: a tab", where=where, remedy="indent with spaces") from None
        if problem == "but found another document":
            raise RequestError("a second document begins", where=where, remedy="remove '---'") from None
        raise RequestError(f"not valid YAML: {problem}", where=where) from None
    except yaml.reader.ReaderError as error:
        where = f"{name}:{text.count(chr(10), 0, error.position) + 1}"
        what = f"not valid YAML: the character {chr(error.character)!a} is not allowed"
        raise RequestError(what, where=where) from None
    except yaml.YAMLError as error:
        raise RequestError(f"not valid YAML: {error}", where=name) from None
    except RecursionError:
        raise RequestError(_TOO_DEEP, where=name) from None
    return document


def require_characters(text: str, where: str) -> None:
    """Raise RequestError for half a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{text[error.start]!a} is no character"
        raise RequestError(what, where=where, remedy="write UTF-8, without escapes such as \\ud83d") from None


class _Loader(yaml.SafeLoader):
    """YAML with the scalars of JSON: no dates or octal numbers, `yes` is text, and `1e-3` is a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        problem = ""
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not supported; write the value"
        elif event.tag is not None:
            problem = f"the tag {event.tag} is not supported; remove it"
        if problem:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", r"true|True|false|False", "tTfF"),
    ("null", r"~|null|", "~n\0"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?((0|[1-9][0-9_]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|nan)",
        "-+.0123456789",
    ),
):
    _Loader.add_implicit_resolver(
        f"{_TAG}{_kind}", re.compile(rf"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )


def _build(node: yaml.Node, path: KeyPath, name: str, locations: dict[KeyPath, str]) -> Any:
    """Return the value of `node`, and record the location of every path inside it in `locations`."""
    locations.setdefault(path, _location(node, name))
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, path, name)
    if len(path) == MAX_DEPTH:
        raise RequestError(_TOO_DEEP, where=_location(node, name))
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, index), name, locations) for index, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    section: dict[str, Any] = {}
    for key_node, value_node in node.value:
        where = _location(key_node, name)
        if not isinstance(key_node, yaml.ScalarNode):
            raise RequestError("a key must be text", where=where)
        key = key_node.value
        require_characters(key, where)
        if key == "<<" and key_node.style is None:
            raise RequestError("merge keys (<<) are not supported; write the keys", where=where)
        inner = (*path, key)
        if key in section:
            first = locations[inner].rpartition(":")[2]
            raise RequestError(f"{dotted(inner)} is given twice (first in line {first})", where=where)
        locations[inner] = where
        section[key] = _build(value_node, inner, name, locations)
    return section


def _scalar(node: yaml.ScalarNode, path: KeyPath, name: str) -> str | int | float | bool | None:
    text = node.value
    match node.tag.removeprefix(_TAG):
        case "str":
            require_characters(text, _location(node, name))
            return str(text)
        case "null":
            return None
        case "bool":
            return bool(text.lower() == "true")
        case "int" if len(text) <= MAX_DIGITS:
            return int(text.replace("_", ""))
        case "float" if math.isfinite(_number(text)):
            return _number(text)
        case "int" | "float":
            key = f"{dotted(path)}: " if path else ""
            problem = "is not a finite number"
            if node.tag.endswith("int"):
                text, problem = text[:MAX_DIGITS], f"... has more than {MAX_DIGITS} digits"
            raise RequestError(f"{key}{text} {problem}", where=_location(node, name))
    raise AssertionError(node.tag)


def _number(text: str) -> float:
    try:
        return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        return math.nan


def _location(node: yaml.Node, name: str) -> str:
    return f"{name}:{node.start_mark.line + 1}"
