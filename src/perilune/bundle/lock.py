"""requirements.lock: exact versions of everything this job's code needs, as installed here."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points

from perilune.bundle.plugin import PLUGIN_GROUP
from perilune.bundle.wheel import NAME
from perilune.errors import WorkFailedError


@cache
def requirements_lock(task: str) -> str:
    """Lines "name==version" for the installed dependencies of perilune and of the plugin that owns `task`.

    The closure follows each package's declared dependencies whose markers hold here, without extras that
    nobody asked for. Perilune itself is left out: it travels as a wheel.

    Raises:
        WorkFailedError: when a declared dependency is not installed.
    """
    waiting = [(NAME, frozenset[str]()), *((owner, frozenset[str]()) for owner in _owners(task))]
    seen: set[tuple[str, frozenset[str]]] = set()
    versions: dict[str, str] = {}
    while waiting:
        name, extras = waiting.pop()
        if (_normal(name), extras) in seen:
            continue
        seen.add((_normal(name), extras))
        versions[_normal(name)] = _find(name).version
        waiting += _needs(name, extras)
    del versions[_normal(NAME)]
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def _owners(task: str) -> list[str]:
    """Distributions that register the task plugin called `task`."""
    points = entry_points(group=PLUGIN_GROUP, name=task)
    return [point.dist.name for point in points if point.dist is not None]


@cache
def _find(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        raise WorkFailedError(
            f"{name} is needed and not installed", remedy=f"pip install {name}, or install perilune again"
        ) from None


@cache
def _needs(name: str, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """What a distribution requires here, given the extras asked of it."""
    from packaging.requirements import Requirement

    needs = []
    for text in _find(name).requires or []:
        need = Requirement(text)
        holds = need.marker is None or any(
            need.marker.evaluate({"extra": extra}) for extra in (extras or {""})
        )
        if holds:
            needs.append((need.name, frozenset(need.extras)))
    return needs


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
