"""The axes of a sweep, and the settings that its arms give them.

An axis is a key of the recipe with several values (`rl.lr=1e-5,3e-5`) or with a range (`rl.lr=1e-6..1e-4`).
"""

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from perilune.errors import RequestError
from perilune.recipe.source import parse_yaml

Settings = tuple[str, ...]  # overrides of a recipe, "key=value"
Bounds = tuple[int, int] | tuple[float, float]

_RANGE = re.compile(r"\s*(?P<low>[-+\d.eE]+?)\.\.(?P<high>[-+\d.eE]+)\s*")
SIGNIFICANT_DIGITS = 3  # of drawn numbers
MAX_SEEDS = 1000


@dataclass(frozen=True, slots=True)
class Axis:
    """A key and its values as text, or the bounds of its range."""

    key: str
    values: tuple[str, ...] = ()
    bounds: Bounds | None = None

    @property
    def is_log(self) -> bool:
        """True if numbers are drawn uniformly on a logarithmic scale: decimal bounds above 0."""
        return self.bounds is not None and isinstance(self.bounds[0], float) and self.bounds[0] > 0

    def draw(self, rng: random.Random) -> str:
        """Draw a listed value, or a number of the range."""
        if self.bounds is None:
            return rng.choice(self.values)
        low, high = self.bounds
        if isinstance(low, int) and isinstance(high, int):
            return str(rng.randint(low, high))
        if self.is_log:
            return self.format_value(math.exp(rng.uniform(math.log(low), math.log(high))))
        return self.format_value(rng.uniform(low, high))

    def format_value(self, value: str | float) -> str:
        """Format a value; a number of a range gets `SIGNIFICANT_DIGITS` and stays in the range."""
        if self.bounds is None or isinstance(value, str):
            return str(value)
        if isinstance(self.bounds[0], int):
            return str(round(value))
        return str(min(max(float(f"{value:.{SIGNIFICANT_DIGITS}g}"), self.bounds[0]), self.bounds[1]))


def parse_axes(options: Sequence[str]) -> tuple[Axis, ...]:
    """Parse options as `parse_axis` does.

    Raises:
        RequestError: two options have the same key, or `parse_axis` refuses one.
    """
    axes: dict[str, Axis] = {}
    for axis in map(parse_axis, options):
        if axis.key in axes:
            remedy = f"list all values in one option: --set {axis.key}=VALUE,VALUE"
            raise RequestError(f"two options set {axis.key}", where="--set", remedy=remedy)
        axes[axis.key] = axis
    return tuple(axes.values())


def parse_axis(option: str) -> Axis:
    """Parse "key=value,value" or "key=low..high". Values are YAML; a single value is an axis, too.

    Raises:
        RequestError: the option has another form, no value or an empty range.
    """
    key, equals, text = option.partition("=")
    location = f"--set {option}"
    if not equals or not key.strip():
        raise RequestError("is not KEY=VALUES", where=location, remedy="--set rl.lr=1e-5,3e-5,1e-4")
    if key.strip() == "seed":
        what = "seeds are not an axis: arms are compared over them"
        raise RequestError(what, where=location, remedy="--seeds 3")
    if match := _RANGE.fullmatch(text):
        return Axis(key.strip(), bounds=_parse_bounds(match, location))
    try:
        values = parse_yaml(f"[{text}]", location).value
    except RequestError as error:
        raise RequestError(error.what, where=location) from None
    if not values:
        raise RequestError("has no value", where=location)
    return Axis(key.strip(), tuple(dict.fromkeys(map(_format_value, values))))


def _parse_bounds(found: re.Match[str], location: str) -> Bounds:
    low, high = (parse_yaml(found[name], location).value for name in ("low", "high"))
    if not all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in (low, high)):
        raise RequestError("a range is two numbers, as in 1e-6..1e-4", where=location)
    if low >= high:
        raise RequestError(f"the range is empty: {low} is not below {high}", where=location)
    return (low, high) if isinstance(low, int) and isinstance(high, int) else (float(low), float(high))


def _format_value(value: Any) -> str:
    """Format a value as YAML that parses to the same value, without quotes where possible."""
    if isinstance(value, str):
        try:
            if parse_yaml(value, "").value == value:
                return value
        except RequestError:
            pass
    return json.dumps(value)


def grid_arms(axes: Sequence[Axis]) -> list[Settings]:
    """Return every combination of the values; the last axis changes first.

    Raises:
        RequestError: an axis is a range.
    """
    for axis in axes:
        if axis.bounds is not None:
            low, high = axis.bounds
            raise RequestError(
                f"{axis.key} has a range, and a grid needs values",
                where=f"--set {axis.key}={low}..{high}",
                remedy="list the values, or add --random N or --search N",
            )
    return [_make_settings(axes, values) for values in product(*(axis.values for axis in axes))]


def sample_arms(axes: Sequence[Axis], count: int, seed: int = 0) -> list[Settings]:
    """Draw up to `count` distinct random arms. With a larger count, further arms follow the same ones."""
    arms = []
    for index in range(count):
        rng = random.Random(f"sweep/{seed}/{index}")
        arms.append(_make_settings(axes, [axis.draw(rng) for axis in axes]))
    return list(dict.fromkeys(arms))


def _make_settings(axes: Sequence[Axis], values: Sequence[str]) -> Settings:
    return tuple(f"{axis.key}={value}" for axis, value in zip(axes, values, strict=True))


def parse_seeds(text: str, first: int) -> tuple[int, ...]:
    """Parse the seeds in "3" (three seeds from `first` on), "3..5" or "0,4,7".

    Raises:
        RequestError: `text` has another form, or more than `MAX_SEEDS` seeds.
    """
    seeds: Sequence[int] = ()
    if text.isdecimal():
        seeds = range(first, first + int(text))
    elif match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        seeds = range(int(match[1]), int(match[2]) + 1)
    elif all(map(str.isdecimal, parts := [part.strip() for part in text.split(",") if part.strip()])):
        seeds = list(dict.fromkeys(map(int, parts)))
    if not seeds:
        what = "is neither a number of seeds nor a list of them"
        remedy = "--seeds 3 for three seeds, --seeds 3..5, or --seeds 0,4,7"
        raise RequestError(what, where=f"--seeds {text}", remedy=remedy)
    if seeds[MAX_SEEDS:]:
        remedy = "--seeds 3 for three seeds, or --seeds 0,4,7 for these"
        raise RequestError(f"has more than {MAX_SEEDS:,} seeds", where=f"--seeds {text}", remedy=remedy)
    return tuple(seeds)
