"""What every tracker is to us, and how one is opened by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

from perilune.errors import RequestError
from perilune.tracking.trail import Figures

SinkName = Literal["tensorboard", "wandb", "mlflow"]
SINKS: tuple[str, ...] = get_args(SinkName)


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run whose figures are copied.

    Attributes:
        id: of the run; what a tracker has of it is replaced or gone on with, never doubled.
        started: seconds since 1970.
        config: JSON-able; what was asked for.
    """

    id: str
    experiment: str
    stage: str
    started: float
    config: Mapping[str, Any]


class Sink(Protocol):
    """A tracker, open for one run.

    Attributes:
        after: the last step that it has already.
        place: where to look at it, as a command or path for people.
    """

    after: int
    place: str

    def write(self, figures: Figures) -> None:
        """Take one step."""
        ...

    def close(self, *, failed: bool = False) -> None:
        """Make what was taken durable, and say how the run ended."""
        ...


def open_sink(name: str, directory: Path, run: TrackedRun) -> Sink:
    """Open the tracker `name` for `run`, with its files below `directory`.

    Raises:
        RequestError: when there is none of that name, or its package is not installed.
    """
    if name not in SINKS:
        raise RequestError(f"no tracker is called '{name}'", remedy=f"one of: {', '.join(SINKS)}")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        module = import_module(f"perilune.tracking.to_{name}")
    except ImportError as error:
        raise RequestError(
            f"{name} cannot be used: {error}", remedy="pip install 'perilune[tracking]'"
        ) from None
    return cast(Sink, module.open_run(directory, run))
