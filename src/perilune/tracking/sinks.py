"""The protocol of trackers, and opening a tracker by name."""

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
        id: run id. A tracker replaces or continues its data of the same run.
        started: seconds since the epoch.
        config: the settings of the stage, as JSON values.
    """

    id: str
    experiment: str
    stage: str
    started: float
    config: Mapping[str, Any]


class Sink(Protocol):
    """A tracker, open for one run.

    Attributes:
        after: the last step that the tracker already has.
        place: a command or URL that shows the run.
    """

    after: int
    place: str

    def write(self, figures: Figures) -> None:
        """Record one step."""

    def close(self, *, failed: bool = False) -> None:
        """Flush all figures, and record whether the run failed."""


def open_sink(name: str, directory: Path, run: TrackedRun) -> Sink:
    """Open the tracker `name` for `run`, with its files below `directory`.

    Raises:
        RequestError: when the name is unknown, or the tracker's package is not installed.
        WorkFailedError: when the tracker's server refuses the run.
    """
    if name not in SINKS:
        raise RequestError(f"no tracker is called '{name}'", remedy=f"one of: {', '.join(SINKS)}")
    directory.mkdir(parents=True, exist_ok=True)
    try:
        module = import_module(f"perilune.tracking.to_{name}")
    except ImportError as error:
        what = f"{name} cannot be imported: {error}"
        raise RequestError(what, remedy="pip install 'perilune[tracking]'") from None
    return cast(Sink, module.Tracker(directory, run))
