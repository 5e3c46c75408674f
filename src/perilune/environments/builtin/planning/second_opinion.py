"""Checks a plan without the verifier, by following the traveller step by step.

An audit of a reward needs a second opinion that shares no code with it. This one splits the text at its
separators and walks: it tracks the traveller's position at each step and checks which places are open.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_DIGITS = frozenset("0123456789")
_NAMES = """
aquarium bakery castle dairy exchange florist gallery harbour icehouse jeweller kiosk library museum nursery
observatory park quarry racecourse stadium theatre university vineyard windmill xylotheque yard zoo
"""
_WORDS = frozenset(_NAMES.split())


def is_valid_plan(trip: Mapping[str, Any], style: str, text: str) -> bool:
    """Return whether a text is one plan that satisfies all constraints of `trip`, given as JSON."""
    try:
        days = _parse_compact(text) if style == "compact" else _parse_words(text)
        return _follow_plan(trip, days)
    except (_NoPlanError, KeyError):
        return False


class _NoPlanError(Exception):
    """The text is not a plan, or the traveller cannot continue."""


def _require(holds: bool) -> None:
    if not holds:
        raise _NoPlanError


def _parse_compact(text: str) -> list[list[tuple[str, int]]]:
    parts = text.split(";")
    _require(len(parts) == 2)
    days = []
    for today in parts[1].rstrip("\n ").split("/"):
        visits = []
        for visit in today.split(",") if today else ():
            _require(len(visit) == 3 and _DIGITS.issuperset(visit[1:]))
            visits.append((visit[0], 10 * int(visit[1]) + int(visit[2])))
        days.append(visits)
    return days


def _parse_words(text: str) -> list[list[tuple[str, int]]]:
    rows = [*text.rstrip("\n ").split("\n")]
    _require(sum(row == "PLAN" for row in rows) == 1)
    days: list[list[tuple[str, int]]] = [[] for _ in range(10)]
    while rows.pop(0) != "PLAN":
        pass
    for row in rows:
        _require(len(row) > 8 and row[1] == row[7] == " " and row[4] == ":" and row[8:] in _WORDS)
        _require(_DIGITS.issuperset(row[0] + row[2:4] + row[5:7]) and row[0] != "0")
        half_hours = {"00": 0, "30": 1}
        _require(row[5:7] in half_hours and row[2:4] >= "09")
        days[int(row[0]) - 1].append((row[8].upper(), 2 * int(row[2:4]) + half_hours[row[5:7]] - 18))
    while days and not days[-1]:
        days.pop()
    return days


def _follow_plan(trip: Mapping[str, Any], days: Sequence[Sequence[tuple[str, int]]]) -> bool:
    _require(len(days) <= trip["days"] or not any(days[trip["days"] :]))
    places = {place["name"]: place for place in trip["places"]}
    money, visited = trip["budget"], []
    for number, today in enumerate(days, start=1):
        x = y = clock = 0
        for name, start in today:
            place = places[name]
            clock += len(list(_steps_between(x, y, *place["at"])))
            x, y = place["at"]
            _require(clock <= start)
            for clock in range(start, start + place["stay"]):
                _require(place["opens"] <= clock < place["closes"])
            clock += 1
            window = place["window"]
            if window:
                _require(window["day"] == number and start in range(window["first"], window["last"] + 1))
            money -= place["price"]
            visited.append(name)
        clock += len(list(_steps_between(x, y, 0, 0)))
        _require(clock <= trip["length"])
    _require(money >= 0 and len(visited) == len(set(visited)) >= trip["visits"])
    return all(name in visited for name, place in places.items() if place["must_see"])


def _steps_between(x: int, y: int, to_x: int, to_y: int) -> Iterator[tuple[int, int]]:
    """Yield the positions along the way, one step apart."""
    while x != to_x:
        x += 1 if x < to_x else -1
        yield x, y
    while y != to_y:
        y += 1 if y < to_y else -1
        yield x, y
