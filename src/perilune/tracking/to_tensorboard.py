"""TensorBoard: event files, one folder per run."""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from perilune.tracking.sinks import TrackedRun
from perilune.tracking.trail import Figures


class Tracker:
    """The event file of one run. It replaces an earlier file of the run."""

    after = -1

    def __init__(self, directory: Path, run: TrackedRun) -> None:
        folder = directory / run.experiment / f"{run.stage}-{run.id}"
        for before in folder.glob("events.out.tfevents.*"):  # TensorBoard would merge two files of a run
            before.unlink()
        self.place = f"tensorboard --logdir {directory}"
        self._started = run.started
        self._writer = EventFileWriter(str(folder))

    def write(self, figures: Figures) -> None:
        """Record one step, at its time in the run."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.values.items()]
        moment = self._started + figures.seconds
        self._writer.add_event(Event(wall_time=moment, step=figures.step, summary=Summary(value=values)))

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()
