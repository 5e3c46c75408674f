"""Placement on another machine: every verb is one call of the runner there, over whatever `Host` leads to it.

The attempt's directory here is made as for a local attempt, sent as it is, and then filled with what comes
back; so evidence looks the same wherever it was made. What can be told only there (who lives, what is whole)
is told there, by the runner that was frozen into the bundle.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import stat
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field, field_validator

from perilune.bundle.digest import describe, entries_digest, walk
from perilune.bundle.scripts import runner_source
from perilune.bundle.secret_sources import require_secret
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.claim import Claim
from perilune.execution.hosts.protocol import Answer, Host, HostRefusedError, HostUnreachableError
from perilune.execution.launchers import process
from perilune.execution.launchers.docker import Container
from perilune.execution.limits import Limits
from perilune.execution.observation import Observation
from perilune.execution.placements.local import working_copy
from perilune.execution.placements.mirror import Mirror
from perilune.execution.placements.protocol import Assignment, Capabilities
from perilune.execution.processes import Presence
from perilune.execution.task_environment import WITHHELD
from perilune.execution.verdict import Cause, Verdict
from perilune.execution.worker import STOP_GRACE
from perilune.files import read_json

BOOT = "import sys; exec(compile(sys.stdin.buffer.read(int(sys.argv.pop(1))), 'runner.py', 'exec'))"
REFUSED, NOT_FOUND = 3, (126, 127)  # exit codes: of the runner that says no; of a shell that has no Python
PULL_BYTES = 32 << 20  # a pull; between two of them, the attempt is looked at
LOOK_SECONDS, CHANGE_SECONDS, SEND_SECONDS = 30.0, 120.0, 6 * 3600.0  # until a call counts as cut off
WHOLE_ROUNDS = 3  # times that what differs from its manifest is pulled again


class Site(BaseModel):
    """What runs need to know of a machine.

    Attributes:
        python: interpreter there; it runs the runner (3.8 or newer), makes the environment (3.11 or newer).
        installed: whether `python` holds what a bundle needs already. It is checked, file by file.
        workspace: folder there below which attempts lie.
        environment: further variables of the worker and of what makes its environment, as PIP_FIND_LINKS.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str = Field("python3", description="interpreter on the machine")
    installed: bool = Field(
        False, description="whether it holds what bundles need already; checked, and nothing is installed"
    )
    workspace: str = Field("~/.perilune/attempts", description="folder on the machine for attempts")
    environment: dict[str, str] = Field(
        {}, description="further variables of the worker and its installer; no secrets"
    )

    def telling(self, variables: Mapping[str, str]) -> Site:
        """The same with further variables of the worker."""
        return self.model_copy(update={"environment": {**self.environment, **variables}})

    @field_validator("environment")
    @classmethod
    def _no_credentials(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if any(word in name.upper() for word in WITHHELD):
                raise ValueError(f"{name} looks like a credential: name it in the recipe's secrets instead")
        return environment


class RemotePlacement:
    """Runs attempts on the machine that `host` leads to.

    Args:
        site: what is where on it.
        limits: how long an attempt may go on there, and unseen.
        container: what workers run in there; None is no container.
    """

    capabilities = Capabilities(elsewhere=True, look_every=1.0)

    def __init__(self, host: Host, site: Site, limits: Limits, container: Container | None = None) -> None:
        self.host, self.site, self.limits, self.container = host, site, limits, container
        self.launcher = process.NAME if container is None else container.name
        self.name = host.name

    def stage(
        self, attempt: Assignment, bundle: Path, order: Mapping[str, Any], previous: Path | None
    ) -> None:
        """As `Placement.stage`: made here (once for all machines), sent, and compared there with that."""
        if attempt.node == 0:
            working_copy(bundle, attempt.directory, order, previous)
        _mirror(attempt).reset()
        files = list(_sent(attempt.directory))
        tree = entries_digest(describe(path, name, path.stat()) for name, path in files)
        total = sum(path.stat().st_size for _, path in files)
        with _tar_stream(files, self._runner(attempt)) as source:
            options = ("--tree", tree, "--bytes", str(total))
            self._call(attempt, "receive", *options, source=source, timeout=SEND_SECONDS)

    def start(self, attempt: Assignment) -> None:
        """As `Placement.start`. Secrets go over stdin into the keeper's memory, and on to the worker."""
        job = read_json(attempt.directory / "job.json")
        secrets = {name: require_secret(name, f"stage {job['stage']}") for name in job["secrets"]}
        environment = {**self.site.environment, "PYTHON": (self.container or self.site).python}
        if self.site.installed:
            environment["PERILUNE_INSTALLED"] = "1"
        values = {"secrets": secrets, "environment": environment}
        options = (
            *("--lifetime", str(self.limits.max_lifetime), "--grace", str(STOP_GRACE)),
            *("--unseen", str(self.limits.on_box_stop_after or 0.0)),
        )
        payload = json.dumps(values).encode()
        with contextlib.suppress(_SupersededError):  # the next look tells
            self._call(attempt, "start", *options, payload=payload, timeout=CHANGE_SECONDS)

    def starting(self, attempt: Assignment) -> bool:
        """Never: `start` waits for the claim."""
        return False

    def observe(self, attempt: Assignment) -> Observation:
        """As `Placement.observe`."""
        try:
            seen = self._call(attempt, "observe", timeout=LOOK_SECONDS)
            return _observation(seen, attempt.epoch)
        except HostRefusedError as error:
            return Observation(unseen=str(error), refused=True)
        except (HostUnreachableError, WorkFailedError) as error:
            return Observation(unseen=str(error))
        except (ValueError, KeyError, TypeError) as error:
            return Observation(unseen=f"{self.name}: its answer makes no sense ({error})")

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        """As `Placement.pull`."""
        mirror = _mirror(attempt)
        if not whole:
            with contextlib.suppress(_UnstagedError):  # the next look tells
                self._pull(attempt, mirror, last=False)
            return
        ended = self._call(attempt, "observe", timeout=LOOK_SECONDS).get("result") is not None
        for round_number in range(WHOLE_ROUNDS):
            with contextlib.suppress(_UnstagedError):
                while self._pull(attempt, mirror, last=ended):
                    pass
            if not ended:
                return
            try:
                mirror.settle()
            except WorkFailedError:
                if round_number == WHOLE_ROUNDS - 1:
                    raise
            else:
                return

    def stop(self, attempt: Assignment) -> bool:
        """As `Placement.stop`."""
        answer = self._call(attempt, "stop", "--grace", str(STOP_GRACE), timeout=CHANGE_SECONDS)
        return answer.get("stopped") is True

    def remove(self, attempt: Assignment) -> None:
        """As `Placement.remove`."""
        self._call(attempt, "remove", timeout=CHANGE_SECONDS)

    def _pull(self, attempt: Assignment, mirror: Mirror, *, last: bool) -> bool:
        """Pull once; whether there is more."""
        with tempfile.TemporaryFile() as frames:
            try:
                payload = mirror.request(PULL_BYTES, last=last)
                self._call(attempt, "pull", payload=payload, sink=frames, timeout=CHANGE_SECONDS)
            finally:  # also when it was cut: what has come, has come
                frames.seek(0)
                pulled = mirror.take(frames)
        if not pulled.ended:
            raise HostUnreachableError(f"{self.name}: what it sent was cut off")
        return pulled.more

    def _runner(self, attempt: Assignment) -> bytes:
        frozen = attempt.directory / "scripts" / "runner.py"
        return frozen.read_bytes() if frozen.exists() else runner_source()

    def _call(
        self,
        attempt: Assignment,
        verb: str,
        *options: str,
        payload: bytes = b"",
        source: BinaryIO | None = None,
        sink: BinaryIO | None = None,
        timeout: float,
    ) -> dict[str, Any]:
        """Run a verb there; its answer.

        Args:
            payload: what follows the runner on stdin; or give `source`, which begins with the runner.
            sink: takes stdout, answer included; the answer returned is empty then.
        """
        runner = self._runner(attempt)
        command = [self.site.python, "-IS", "-c", BOOT, str(len(runner)), verb]
        command += [
            "--workspace",
            self.site.workspace,
            "--run",
            f"{attempt.run_id}node{attempt.node}" if attempt.node else attempt.run_id,
            "--epoch",
            str(attempt.epoch),
        ]
        if self.container is not None:
            command += ["--container", json.dumps(self.container.described())]
        given = source or io.BytesIO(runner + payload)
        answer = self.host.run([*command, *options], source=given, sink=sink, timeout=timeout)
        if answer.exit_code in NOT_FOUND:
            raise HostRefusedError(
                f"it has no {self.site.python}", where=self.name, remedy="name its Python in the template"
            )
        if answer.exit_code == REFUSED and sink is None:
            raise self._refusal(answer)
        if answer.exit_code == REFUSED:
            raise _UnstagedError(f"{self.name}: nothing to pull")
        if answer.exit_code != 0:
            said = (answer.errors.strip().splitlines() or ["it said nothing"])[-1]
            kind = (
                WorkFailedError if verb == "receive" else HostUnreachableError
            )  # what came of it is unknown
            raise kind(f"the runner failed: {said}", where=self.name)
        return {} if sink is not None else _last_document(answer.output, self.name)

    def _refusal(self, answer: Answer) -> Exception:
        said = _last_document(answer.output, self.name)
        what, kind = str(said.get("refused"))[:2000], said.get("kind")
        if kind == "disk_full":
            error = RequestError(
                what, where=self.name, remedy="free some space there, or name another workspace"
            )
            error.__cause__ = OSError(28, what)
            return error
        return {"superseded": _SupersededError, "unstaged": _UnstagedError}.get(str(kind), WorkFailedError)(
            f"{self.name}: {what}"
        )


class _SupersededError(WorkFailedError):
    """A newer attempt has begun there."""


class _UnstagedError(WorkFailedError):
    """The attempt's files are not there."""


def _mirror(attempt: Assignment) -> Mirror:
    """What comes home from the machine: the evidence where it leads, else what it says of itself."""
    return Mirror(attempt.home, ("runtime", "artifacts") if attempt.node == 0 else ("runtime",))


def _observation(seen: Mapping[str, Any], epoch: int) -> Observation:
    """What the runner saw, checked: it comes from elsewhere."""
    fields, result = seen["claim"], seen["result"]
    if seen["superseded"]:
        return Observation(superseded=True)
    if fields is None:
        return Observation()
    claim = Claim(
        epoch=int(fields["epoch"]),
        host=str(fields["host"]),
        boot_id=str(fields["boot_id"]),
        pid=int(fields["pid"]),
        starttime=int(fields["starttime"] or 0),
        nonce=str(fields["nonce"]),
    )
    verdict = None
    if result is not None:
        verdict = Verdict(
            epoch=int(result["epoch"]),
            exit_code=_number(result["exit_code"]),
            signal=_number(result["signal"]),
            cause=Cause(result["cause"]).value,
            message=str(result["message"])[:2000],
            manifest_digest=None if result["manifest_digest"] is None else str(result["manifest_digest"]),
            seconds=float(result["seconds"]),
        )
    if claim.epoch != epoch or (verdict is not None and verdict.epoch != epoch):
        raise ValueError("it speaks of another attempt")
    worker = {True: Presence.PRESENT, False: Presence.ABSENT, None: Presence.UNKNOWN}[seen["alive"]]
    return Observation(claim, worker, verdict, heartbeat=int(seen["heartbeat"]))


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _last_document(output: bytes, name: str) -> dict[str, Any]:
    """The JSON object on the last line; shells may have greeted before it."""
    lines = output.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise HostUnreachableError(f"{name}: its answer was cut off")
    return found


def _sent(directory: Path) -> Iterator[tuple[str, Path]]:
    """The files of a fresh working copy."""
    for relative, status in walk(directory):
        if stat.S_ISREG(status.st_mode):
            yield relative, directory / relative


@contextmanager
def _tar_stream(files: list[tuple[str, Path]], head: bytes) -> Iterator[BinaryIO]:
    """A stream of `head` and then a tar of `files`, made while it is read."""
    reading, writing = os.pipe()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as out:
            out.write(head)
            with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                for relative, path in files:
                    status = path.stat()
                    member = tarfile.TarInfo(relative)
                    member.size, member.mode, member.mtime = (
                        status.st_size,
                        status.st_mode & 0o777,
                        time.time(),
                    )
                    with path.open("rb") as content:
                        tar.addfile(member, content)

    thread = threading.Thread(target=write, name="tar", daemon=True)
    thread.start()
    try:
        with os.fdopen(reading, "rb") as stream:
            yield stream
    finally:
        thread.join()
