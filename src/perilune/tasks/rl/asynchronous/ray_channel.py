"""Rollout processes on the nodes of a Ray cluster.

An actor on a node unpacks the bundle, starts the rollout process on that node, and passes on its messages
and files. Weights and finished groups travel through Ray's object store. Every node must have the learner's
versions of Perilune, torch and numpy.
"""

import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from perilune.errors import RequestError, WorkFailedError
from perilune.files import extract_archive, write_atomic
from perilune.tasks.rl.asynchronous.channel import FILE_KEYS, Channel, LocalChannel, Message
from perilune.tasks.rl.asynchronous.settings import RaySettings

EXCLUDED_PARTS = ("artifacts", "runtime")  # parts of a bundle that a rollout process does not need
RECEIVE_GROUP = "out"  # Ray's concurrency group of `receive`, which may wait while `send` runs


class RayCluster:
    """Starts rollout processes on the cluster.

    Args:
        folder: the learner's folder for files.

    Raises:
        WorkFailedError: when the cluster cannot be reached, or is too small for all processes.
    """

    def __init__(self, settings: RaySettings, workers: int, bundle: Path, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._ray = _connect(settings)
        self._require_resources(workers)
        self._bundle = self._ray.put(_pack_bundle(bundle))

    def _require_resources(self, workers: int) -> None:
        resources = self._ray.cluster_resources()
        for name, amount in (("CPU", self._settings.cpus), ("GPU", self._settings.gpus)):
            if resources.get(name, 0) < workers * amount:
                raise WorkFailedError(
                    f"the Ray cluster has {resources.get(name, 0):g} {name}s,"
                    f" and {workers} rollout processes need {workers * amount:g}",
                    where="asynchronous.ray",
                    remedy="lower asynchronous.workers, or add nodes",
                )

    def open(self) -> Channel:
        """Start a process. Ray spreads the processes over the nodes."""
        actor = self._ray.remote(
            num_cpus=self._settings.cpus,
            num_gpus=self._settings.gpus,
            scheduling_strategy="SPREAD",
            concurrency_groups={RECEIVE_GROUP: 1},
        )(_Actor)
        return RayChannel(self._ray, actor.remote(self._bundle, _package_versions()), self._folder)


class RayChannel(Channel):
    """The learner's end of the connection to an actor."""

    def __init__(self, ray: Any, actor: Any, folder: Path) -> None:
        self._ray, self._actor, self._folder = ray, actor, folder
        self._end = "the loss of its node"

    def send(self, message: Message) -> None:
        name = message.get("weights")
        content = None if name is None else (self._folder / name).read_bytes()
        self._actor.send.remote(json.dumps(message).encode(), content)

    def messages(self) -> Iterator[Message]:
        while True:
            try:
                line, content = self._ray.get(
                    self._actor.receive.options(concurrency_group=RECEIVE_GROUP).remote()
                )
            except self._ray.exceptions.RayError as error:
                self._end = shorten(str(error).strip().splitlines()[-1], 160)
                return
            if not line:
                self._end = "an unknown exit code"
                return
            message = json.loads(line)
            if (name := _named_file(message)) is not None:
                write_atomic(self._folder / Path(name).name, content)
            yield message

    def close(self) -> str:
        self._ray.kill(self._actor)
        return self._end


class _Actor:
    """Runs a rollout process on the node of this actor.

    Args:
        bundle: the bundle as a tar archive.
        versions: the learner's versions of packages.

    Raises:
        RuntimeError: when this node has other versions.
    """

    def __init__(self, bundle: bytes, versions: Mapping[str, str]) -> None:
        if (own_versions := _package_versions()) != versions:
            different = sorted(name for name in versions if own_versions.get(name) != versions[name])
            raise RuntimeError(f"this node has other versions than the learner of: {', '.join(different)}")
        self._folder = Path(tempfile.mkdtemp(prefix="rollouts-"))  # the rollout process removes it at its end
        root = self._folder / "bundle"
        with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
            extract_archive(archive, root)
        for name in EXCLUDED_PARTS:
            (root / name).mkdir(exist_ok=True)
        self._channel = LocalChannel(root, self._folder)
        self._lines = self._channel.lines()

    def send(self, line: bytes, content: bytes | None) -> None:
        """Pass on a message, and the file of weights that it names."""
        if content is not None:
            write_atomic(self._folder / str(_named_file(json.loads(line))), content)
        self._channel.send_line(line)

    def receive(self) -> tuple[bytes, bytes]:
        """Return the process's next message, and the content of the file that it names; empty at its end."""
        line = next(self._lines, b"")
        message = json.loads(line) if line else {}
        for loaded in self._folder.glob("weights-*"):
            if int(loaded.stem.rpartition("-")[2]) <= message.get("holds", -1):
                loaded.unlink()  # later updates do not need the file
        name = _named_file(message)
        if name is None:
            return line, b""
        path = self._folder / name
        content = path.read_bytes()
        path.unlink()
        return line, content


def _package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide which tokens are sampled."""
    return {name: version(name) for name in ("perilune", "torch", "numpy")}


def _named_file(message: Message) -> str | None:
    return next((message[key] for key in FILE_KEYS if key in message), None)


def _connect(settings: RaySettings) -> Any:
    """Return the `ray` module, connected to the cluster."""
    try:
        import ray
    except ImportError:
        raise RequestError(
            "Ray is not installed", where="asynchronous.ray", remedy="pip install 'ray[default]'"
        ) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(
            address=settings.address, ignore_reinit_error=True, log_to_driver=True, configure_logging=False
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise WorkFailedError(
            f"cannot connect to the Ray cluster: {error}",
            where=f"asynchronous.ray.address: {settings.address}",
            remedy="start it (ray start --head), or correct the address",
        ) from None
    return ray


def _pack_bundle(bundle: Path) -> bytes:
    """Return a tar archive of the parts of a bundle that a rollout process needs; follows links."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", dereference=True) as archive:
        for part in sorted(bundle.iterdir()):
            if part.name not in EXCLUDED_PARTS:
                archive.add(part, part.name)
    return stream.getvalue()
