"""Starts the rollout processes of a stage, sends them weights and groups, and replaces those that die.

A process that dies loses its episodes in progress. Their groups begin again in the other processes or in its
replacement.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from perilune.bundle.workspace import Workspace
from perilune.errors import ProcessLostError, WorkFailedError
from perilune.learn.adaptation import trainable
from perilune.models.checkpoints.checksum import checksum
from perilune.models.decoder import Decoder
from perilune.rollout.continuous import VersionRuns
from perilune.rollout.groups import Groups, map_groups
from perilune.sandbox.folders import OwnedFolder
from perilune.tasks.rl.asynchronous.channel import Channel, LocalChannel
from perilune.tasks.rl.asynchronous.ray_channel import RayCluster
from perilune.tasks.rl.asynchronous.settings import AsynchronousSettings
from perilune.weights.delta import ChangeFinder, Update, WeightWriter
from perilune.weights.precision import engine_dtypes

MAX_LOSSES_IN_A_ROW = 3  # lost processes without a finished group in between, at which the stage fails
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - preferred place of the folder for weights
FOLDER_PREFIX = "perilune-rollouts-"  # of the names of folders for weights
KEPT_VERSIONS = 2  # the current version, and the previous one, which a process may still read

Key = tuple[int, int]


class Finished(NamedTuple):
    """A finished group: its episodes by player, and for each sample the versions of its tokens."""

    groups: Groups
    version_runs: list[VersionRuns]


@dataclass(eq=False)
class _Process:
    """One rollout process.

    Attributes:
        groups: the `admit` messages of the groups that the process plays, by key.
        version: version of the weights that the process has loaded; -1 before the first.
    """

    number: int
    channel: Channel
    groups: dict[Key, Mapping[str, Any]] = field(default_factory=dict)
    version: int = -1


class Fleet:
    """The rollout processes of a stage.

    Args:
        weights: size of all weights in bytes.
        replaces_processes: whether to replace a process that dies; otherwise its death is an error.

    Attributes:
        finished: finished groups that no step has trained on yet, by key.
        lost_processes: number of processes that died so far.
        publish_lag_s: seconds from the publication of a version until all processes had loaded it, for the
            newest such version.
        write_s: seconds to write the last update.
    """

    def __init__(
        self, workspace: Workspace, settings: AsynchronousSettings, weights: int, *, replaces_processes: bool
    ) -> None:
        self.finished: dict[Key, Finished] = {}
        self.lost_processes = 0
        self.publish_lag_s = self.write_s = 0.0
        self._workspace, self._replaces_processes = workspace, replaces_processes
        self._owned = OwnedFolder(FOLDER_PREFIX, _choose_folder(workspace, weights))
        self._folder = folder = Path(self._owned.path)
        self._open: Callable[[], Channel] = (
            partial(LocalChannel, workspace.root, folder)
            if settings.ray is None
            else RayCluster(settings.ray, settings.workers, workspace.root, folder).open
        )
        self._writer = WeightWriter(settings.weights)
        # The updates that a new process needs, in order, each with its message.
        self._updates: list[tuple[Update, dict[str, Any]]] = []
        self._published: dict[int, float] = {}  # publication times of versions that some process lacks
        self._lost_in_a_row = 0
        self._messages: SimpleQueue[tuple[float, _Process, Mapping[str, Any] | None]] = SimpleQueue()
        self._answers: list[str | int] = []
        self._processes = [self._start(number) for number in range(settings.workers)]

    def close(self) -> None:
        for process in self._processes:
            process.channel.close()
        self._owned.remove()

    # -- messages to the processes -------------------------------------------------------------------------

    def publish(self, decoder: Decoder, version: int, changed: ChangeFinder | None) -> None:
        """Send the decoder's weights to all processes, which load them between two tokens.

        The first update has all tensors, later ones only the trained tensors, in the engines' precision.

        Args:
            changed: finds the values that changed since the last version; None sends all.
        """
        start = time.monotonic()
        dtypes, state = engine_dtypes(decoder), decoder.state_dict()
        loaded = {key: value.to(dtypes.get(key, value.dtype)).to(value.dtype) for key, value in state.items()}
        names = trainable(decoder) if self._updates else state
        path = self._folder / f"weights-{version}.safetensors"
        sent = {name: loaded[name].to(dtypes.get(name, loaded[name].dtype)) for name in names}
        update = self._writer.write(path, sent, version, changed)
        message = {"weights": path.name, "version": version, "checksum": checksum(loaded)}
        needed = [(old, message) for old, message in self._updates if not update.replaces(old)]
        self._updates = [*needed, (update, message)]
        self._published[version] = time.monotonic()
        self.write_s = self._published[version] - start
        for process in self._processes:
            process.channel.send(message)
        self._remove_old_weights()

    @property
    def last_update(self) -> Update:
        return self._updates[-1][0]

    def _remove_old_weights(self) -> None:
        needed = {update.path for update, _ in self._updates}
        files = set(self._folder.glob("weights-*")) - needed
        for old in sorted(files, key=lambda file: file.stat().st_mtime_ns)[: -KEPT_VERSIONS + 1]:
            old.unlink()

    def admit(self, message: Mapping[str, Any]) -> None:
        """Send a group to the process with the fewest groups.

        Args:
            message: the group, as in the `admit` message of `perilune.tasks.rl.asynchronous.process`.
        """
        process = min(self._processes, key=lambda process: (len(process.groups), process.number))
        process.groups[tuple(message["key"])] = message
        process.channel.send({"admit": message})

    def snapshot(self) -> dict[Key, Any]:
        """Return the turns sampled so far of all groups in flight, by key."""
        recorded: dict[Key, Any] = {}
        for process in list(self._processes):
            name = f"snapshot-{process.number}.json"
            process.channel.send({"snapshot": name})
            self._answers = []
            while name not in self._answers and process in self._processes:
                self.receive()
            if process in self._processes:
                for group in json.loads((self._folder / name).read_bytes()):
                    recorded[tuple(group["key"])] = group["samples"]
        return {key: value for key, value in recorded.items() if key not in self.finished}

    def wait_until_idle(self, number: int) -> None:
        """Wait until no process can continue without new weights or groups.

        Args:
            number: identifies the answers to this call.
        """
        for process in list(self._processes):
            process.channel.send({"settle": number})
            self._answers = []
            while number not in self._answers:
                self.receive()

    # -- messages from the processes -----------------------------------------------------------------------

    @property
    def oldest_version(self) -> int:
        return min(process.version for process in self._processes)

    def receive(self, *, wait: bool = True) -> None:
        """Handle all messages that have arrived; by default wait for the first.

        Raises:
            WorkFailedError: when a process reports a failure.
            ProcessLostError: when a process dies and is not replaced, or after `MAX_LOSSES_IN_A_ROW` losses.
        """
        while wait or not self._messages.empty():
            self._handle(*self._messages.get())
            wait = False

    def _handle(self, arrival: float, process: _Process, message: Mapping[str, Any] | None) -> None:
        if process not in self._processes:
            return  # the process has been replaced
        if message is None:
            self._replace(process)
        elif "group" in message:
            key = tuple(message["group"])
            path = self._folder / message["file"]
            if process.groups.pop(key, None) is not None:
                self.finished[key] = Finished(map_groups(path), message["version_runs"])
            path.unlink()
            self._lost_in_a_row = 0
        elif "holds" in message:
            process.version = message["holds"]
            oldest = self.oldest_version
            if oldest in self._published:
                self.publish_lag_s = arrival - self._published[oldest]
                self._published = {v: began for v, began in self._published.items() if v > oldest}
        elif "failed" in message:
            raise WorkFailedError(f"a rollout process failed: {message['failed']}")
        else:
            self._answers += message.values()

    def _start(self, number: int) -> _Process:
        process = _Process(number, self._open())
        Thread(target=self._read, args=(process,), name=f"rollout process {number}", daemon=True).start()
        for _, message in self._updates:
            process.channel.send(message)
        return process

    def _read(self, process: _Process) -> None:
        for message in process.channel.messages():
            self._messages.put((time.monotonic(), process, message))
        self._messages.put((time.monotonic(), process, None))

    def _replace(self, process: _Process) -> None:
        end = process.channel.close()
        if not self._replaces_processes:
            raise ProcessLostError(
                f"a rollout process ended with {end} while a schedule was followed",
                remedy="see the log above, and run `perilune reproduce` again",
            )
        self.lost_processes += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MAX_LOSSES_IN_A_ROW:
            raise ProcessLostError(
                f"{MAX_LOSSES_IN_A_ROW} rollout processes ended without a finished group in between; the last"
                f" ended with {end}",
                remedy="see the log above; if memory ran out, lower `prompts`, `max_tokens` or `workers`",
            )
        groups = list(process.groups.values())
        self._workspace.log(
            f"warning: rollout process {process.number} ended with {end}; {len(groups)} groups begin again"
        )
        self._workspace.event("rollout_process_lost", number=process.number, groups=len(groups))
        self._processes[self._processes.index(process)] = self._start(process.number)
        for message in groups:
            self.admit({**message, "recorded": None})


def _choose_folder(workspace: Workspace, weights: int) -> Path:
    """Return the folder of shared memory if it has room for all kept versions, else the run's own folder.

    Args:
        weights: size of all weights in bytes.
    """
    needed = 2 * (KEPT_VERSIONS + 1) * weights
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= needed
    return SHARED_MEMORY if in_memory else workspace.runtime
