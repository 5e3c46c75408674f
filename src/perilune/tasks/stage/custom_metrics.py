"""Metrics of users: functions of the episodes of a training step or of an evaluation.

The functions run in the stage's process. Their values are only recorded, and do not influence training.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from perilune.errors import RequestError
from perilune.extensions import METRIC_GROUP, CodeFile, CodeReference, load_extension

if TYPE_CHECKING:
    from perilune.data.episode import Episode

CustomMetric = Callable[[Sequence["Episode"]], float | None]
CustomMetricsField = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str | CodeFile], CodeReference(many=True)
]


class CustomMetrics:
    """The metrics that a stage names.

    Args:
        named: the function of each metric: an entry point, module:name, or a function in a file.
        log: called with a warning the first time that a metric fails.

    Raises:
        RequestError: when a function cannot be loaded, or does not take the episodes.
    """

    def __init__(self, named: Mapping[str, str | CodeFile], log: Callable[[str], None] = print) -> None:
        self._functions = {name: _load(name, function) for name, function in named.items()}
        self._log = log
        self._failed: set[str] = set()

    def figures(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return the metrics that are finite numbers. A metric that fails or returns None is left out."""
        figures = {}
        for name, function in self._functions.items():
            try:
                value = function(episodes)
                if value is None:
                    continue
                if not math.isfinite(value):
                    raise ValueError(f"it returned {value}")
                figures[name] = float(value)
            except Exception as error:
                if name not in self._failed:
                    self._log(f"warning: metric {name!r} failed: {type(error).__name__}: {error}")
                self._failed.add(name)
        return figures


def _load(name: str, named: str | CodeFile) -> CustomMetric:
    reference, source = (named, None) if isinstance(named, str) else (named.name, named.source)
    where = f"metrics.{name}"
    function = load_extension(reference, source, METRIC_GROUP, where)
    try:
        inspect.signature(function).bind([])
    except TypeError as error:
        raise RequestError(
            f"{reference} must be a function of the episodes: {error}",
            where=where,
            remedy="write def NAME(episodes): return a number, or None for no value",
        ) from None
    return function  # type: ignore[no-any-return]
