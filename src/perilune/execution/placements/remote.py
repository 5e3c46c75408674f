"""Placement on another machine: every operation is one call of the runner there, through a `Host`.

The attempt's directory is created here as for a local attempt, uploaded, and then filled with the files that
are pulled, so evidence looks the same wherever it was made. Only the runner can tell which processes live and
which files are complete. Calls use the runner of this package; the runner frozen into the bundle is the
attempt's keeper.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, BinaryIO

from pydantic import Field, field_validator

from perilune.bundle.manifest import output_bytes
from perilune.bundle.scripts import remote_source
from perilune.bundle.secret_sources import require_secret
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.background import in_background
from perilune.execution.hosts.protocol import Host, HostRefusedError, HostUnreachableError
from perilune.execution.launchers import process
from perilune.execution.launchers.docker import Container
from perilune.execution.limits import AttemptLimits
from perilune.execution.observation import Observation
from perilune.execution.placements.answers import (
    MAX_MESSAGE_CHARS,
    make_observation,
    parse_first_observation,
    parse_last_document,
)
from perilune.execution.placements.held import find_restart_reason, parse_held, read_held, write_held
from perilune.execution.placements.local import create_working_copy
from perilune.execution.placements.mirror import Bring, Mirror, PullResult, open_mirror
from perilune.execution.placements.origins import HUB_URL
from perilune.execution.placements.protocol import (
    Assignment,
    Capabilities,
    StagingCancelledError,
    StagingRequest,
)
from perilune.execution.placements.upload import Upload
from perilune.execution.task_environment import SECRET_WORDS
from perilune.execution.worker import STOP_GRACE_S
from perilune.files import read_json
from perilune.frozen import Frozen

# Reads modules from stdin, each with its name and size on the command line; the last is the program.
BOOT_PROGRAM = """import sys
for part in sys.argv.pop(1).split(","):
    name, size = part.split(":")
    module = sys.modules.setdefault(name, type(sys)(name))
    exec(compile(sys.stdin.buffer.read(int(size)), name, "exec"), module.__dict__)
"""
PACKAGE, PROGRAM = "perilune.bundle.remote", "__main__"
RUNNER_PARTS = ("runner",)
HOLDER_PARTS = ("runner", "store", "holder")
PARTS_BY_VERB = {
    "receive": ("runner", "store", "receiver"),
    "hold": HOLDER_PARTS,
    "keep_outputs": HOLDER_PARTS,
}
REFUSED, NOT_FOUND = 3, (126, 127)  # exit codes: of a runner that refuses; of a shell that finds no Python
LOOK_BYTES, PULL_BYTES = 256 << 10, 32 << 20  # transferred with one observation, and with one pull
LOOK_SECONDS, CHANGE_SECONDS, SEND_SECONDS = 30.0, 120.0, 6 * 3600.0  # timeouts of calls
HOLD_SECONDS = 1800.0  # timeout of a call that hashes checkpoints
LARGE_FILE_BYTES = 1 << 20  # the machine keeps outputs of at least this size for later stages
MAX_PULLS = 3  # tries to pull files that differ from the manifest
MAX_SENDS = 3  # uploads: to learn what is missing, to send it, and to repeat damaged contents
BUSY_SECONDS = 2.0  # pause while another call uploads to the same attempt
CANCEL_SECONDS = 0.5  # between two checks of an upload for a cancellation


class Site(Frozen):
    """Settings of a machine for runs.

    Attributes:
        python: interpreter; 3.8 or newer for the runner, 3.11 or newer to create the bundle's environment.
        installed: whether `python` already has the bundle's packages, which is verified file by file.
        environment: further variables for the worker and for its installer, such as PIP_FIND_LINKS.
        store: share of the workspace's disk for uploaded contents, so that they are uploaded only once.
    """

    python: str = Field("python3", description="interpreter on the machine")
    installed: bool = Field(
        False,
        description="whether the machine already has all packages; Perilune then checks them and installs"
        " nothing",
    )
    workspace: str = Field("~/.perilune/attempts", description="folder on the machine for attempts")
    environment: dict[str, str] = Field(
        {}, description="additional environment variables of the worker and its installer; no secrets"
    )
    store: float = Field(
        0.25,
        ge=0,
        le=1,
        description="maximum share of the machine's disk for uploaded files, which stay for later runs",
    )

    def with_environment(self, variables: Mapping[str, str]) -> Site:
        return self.model_copy(update={"environment": {**self.environment, **variables}})

    @field_validator("environment")
    @classmethod
    def _no_credentials(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if any(word in name.upper() for word in SECRET_WORDS):
                raise ValueError(f"{name} looks like a credential: list it in the recipe's secrets instead")
        return environment


class RemotePlacement:
    """Runs attempts on the machine of `host`.

    Args:
        container: the container that workers run in; None for plain processes.
        bring: which checkpoints are fetched. The machine keeps the others for the next attempt.
        lasting: whether the machine outlives its attempts. If not, the checkpoints to resume from are fetched
            when an attempt ends early.
    """

    capabilities = Capabilities(is_remote=True, look_interval_s=1.0)

    def __init__(
        self,
        host: Host,
        site: Site,
        limits: AttemptLimits,
        container: Container | None = None,
        *,
        bring: Bring = "all",
        lasting: bool = True,
    ) -> None:
        self.host, self.site, self.limits, self.container = host, site, limits, container
        self.bring, self.lasting = bring, lasting
        self.launcher = process.NAME if container is None else container.name
        self.name = host.name

    def stage(self, attempt: Assignment, request: StagingRequest) -> str:
        """Implement `Placement.stage`: created here (once for all machines), uploaded, and verified there."""
        before = None if request.previous is None else request.previous.directory
        if attempt.node == 0:
            if request.previous is not None and self._stores_checkpoints:
                self._store_lost_checkpoints(request.previous)
            create_working_copy(request, attempt.directory)
        with self._mirror(attempt) as home:
            home.reset()
        held = read_held(before) if before is not None and self.bring != "all" else []
        write_held(attempt.directory, held)
        upload = Upload(attempt.directory, attempt.node, held, self._hub_url)
        wanted, rounds, until = upload.small_contents(), 0, time.monotonic() + SEND_SECONDS
        while rounds < MAX_SENDS and time.monotonic() < until:
            answer = self._send(attempt, upload, wanted, request.is_cancelled)
            if answer.get("received") == upload.tree:
                return find_restart_reason(before, upload)
            if answer.get("busy") is True:
                time.sleep(BUSY_SECONDS)
                wanted = upload.small_contents()
                continue
            try:
                wanted, rounds = upload.parse_wanted(answer.get("missing")), rounds + 1
            except (ValueError, TypeError) as error:
                raise HostUnreachableError(f"{self.name}: its answer is malformed ({error})") from None
            if upload.has_lost(wanted):
                write_held(attempt.directory, [])
                upload = Upload(attempt.directory, attempt.node, hub=self._hub_url)
                wanted = upload.small_contents()
        raise WorkFailedError("the uploaded files arrive damaged", where=self.name)

    def _send(
        self,
        attempt: Assignment,
        upload: Upload,
        wanted: Mapping[str, int],
        is_cancelled: Callable[[], bool],
    ) -> dict[str, Any]:
        """Upload the `wanted` contents and return the machine's answer.

        Raises:
            StagingCancelledError: without waiting for the machine, which reads the end of its input.
        """
        options = ("--tree", upload.tree, "--bytes", str(upload.size), "--share", str(self.site.store))
        with upload.stream(_part_sources(PARTS_BY_VERB["receive"]), wanted) as source:
            call = in_background(
                lambda: self._call(attempt, "receive", *options, source=source, timeout=SEND_SECONDS)
            )
            while not call.done():
                if is_cancelled():
                    raise StagingCancelledError("the run is cancelled", where=self.name)
                wait((call,), CANCEL_SECONDS)
            return call.result()

    def start(self, attempt: Assignment) -> None:
        """Implement `Placement.start`. Secrets go over stdin to the keeper's memory, then to the worker."""
        job = read_json(attempt.directory / "job.json")
        secrets = {name: require_secret(name, f"stage {job['stage']}") for name in job["secrets"]}
        environment = {**self.site.environment, "PYTHON": (self.container or self.site).python}
        if self.site.installed:
            environment["PERILUNE_INSTALLED"] = "1"
        values = {"secrets": secrets, "environment": environment}
        options = (
            *("--lifetime", str(self.limits.max_lifetime), "--grace", str(STOP_GRACE_S)),
            *("--unseen", str(self.limits.on_box_stop_after or 0.0)),
        )
        payload = json.dumps(values).encode()
        with contextlib.suppress(_SupersededError):  # the next observation reports it
            self._call(attempt, "start", *options, payload=payload, timeout=CHANGE_SECONDS)

    def is_starting(self, attempt: Assignment) -> bool:
        """Return False, because `start` waits for the claim."""
        return False

    def observe(self, attempt: Assignment) -> Observation:
        """Implement `Placement.observe`. Transfers small new files, unless another process does."""
        try:
            with open_mirror(attempt.home, _pulled_folders(attempt), self.bring) as home:
                look, pulled = self._observe(attempt, home, LOOK_BYTES, LOOK_SECONDS)
            return make_observation(look, attempt.epoch, more=home is None or not pulled.ended or pulled.more)
        except HostRefusedError as error:
            return Observation(unseen=str(error), refused=True)
        except (HostUnreachableError, WorkFailedError) as error:
            return Observation(unseen=str(error))
        except (ValueError, KeyError, TypeError) as error:
            return Observation(unseen=f"{self.name}: its answer is malformed ({error})")

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        with self._mirror(attempt) as home:
            if not whole:
                self._pull(attempt, home, last=False)
                return
            for round_number in range(MAX_PULLS):
                more, ended = True, False
                while more:
                    more, ended = self._pull(attempt, home, last=True)
                if not ended:
                    return
                try:
                    home.settle()
                except WorkFailedError:
                    if round_number == MAX_PULLS - 1:
                        raise
                else:
                    return

    def stop(self, attempt: Assignment) -> bool:
        answer = self._call(attempt, "stop", "--grace", str(STOP_GRACE_S), timeout=CHANGE_SECONDS)
        return answer.get("stopped") is True

    def remove(self, attempt: Assignment) -> None:
        """Implement `Placement.remove`.

        The machine keeps large outputs, so that a later stage there need not upload them again, and the
        checkpoints that the next attempt resumes from and that were not fetched.
        """
        if attempt.node == 0 and output_bytes(attempt.directory) >= LARGE_FILE_BYTES:
            self._call(attempt, "keep_outputs", "--share", str(self.site.store), timeout=HOLD_SECONDS)
        if attempt.node == 0 and self._stores_checkpoints:
            self._store_checkpoints(attempt)
        self._call(attempt, "remove", timeout=CHANGE_SECONDS)

    @property
    def _stores_checkpoints(self) -> bool:
        """True if the machine keeps checkpoints for the next attempt."""
        return self.bring != "all" and self.lasting

    def _store_checkpoints(self, attempt: Assignment, *options: str) -> None:
        """Move the attempt's checkpoints to the machine's store, and record which files the store has."""
        options = ("--share", str(self.site.store), *options)
        answer = self._call(attempt, "hold", *options, timeout=HOLD_SECONDS)
        if answer.get("held") is not None:
            try:
                write_held(attempt.directory, parse_held(answer["held"]))
            except (ValueError, TypeError) as error:
                raise HostUnreachableError(f"{self.name}: its answer is malformed ({error})") from None

    def _store_lost_checkpoints(self, attempt: Assignment) -> None:
        """Move the checkpoints of a lost attempt to the machine's store, if its files are still there.

        The attempt's processes are ended first, as `start` of the next attempt would do, so that nothing
        writes to the files. The metrics are fetched, because resuming needs those of all earlier steps.
        """
        look, _ = self._observe(attempt, None, 0, LOOK_SECONDS)
        if look.get("staged") is not True or not self.stop(attempt):
            return
        with contextlib.suppress(WorkFailedError):  # files are damaged; the next attempt computes them again
            self.pull(attempt, whole=True)
        self._store_checkpoints(attempt, "--lost")

    @property
    def _hub_url(self) -> str:
        """The hub that the machine downloads base models from; "" if its settings say that it is offline."""
        variables = self.site.environment
        offline = variables.get("HF_HUB_OFFLINE", "0") not in {"", "0"}
        return "" if offline else variables.get("HF_ENDPOINT", HUB_URL)

    @contextlib.contextmanager
    def _mirror(self, attempt: Assignment) -> Iterator[Mirror]:
        attempt.home.parent.mkdir(parents=True, exist_ok=True)
        given = attempt.home, _pulled_folders(attempt), self.bring
        with open_mirror(*given, rescue=not self.lasting, patience=2 * LOOK_SECONDS) as home:
            if home is None:
                raise HostUnreachableError(f"{self.name}: another command is transferring files from it")
            yield home

    def _pull(self, attempt: Assignment, home: Mirror, *, last: bool) -> tuple[bool, bool]:
        """Pull once; returns whether there is more, and whether the attempt has ended."""
        look, pulled = self._observe(attempt, home, PULL_BYTES, CHANGE_SECONDS, last=last)
        if not pulled.ended:
            raise HostUnreachableError(f"{self.name}: the transfer was interrupted")
        return pulled.more, look.get("result") is not None

    def _observe(
        self, attempt: Assignment, home: Mirror | None, limit: int, seconds: float, *, last: bool = False
    ) -> tuple[dict[str, Any], PullResult]:
        """Return the runner's observation, and how many of its new files arrived in `home`."""
        asked = {"files": {}, "units": [], "folders": []} if home is None else home.state()
        payload = json.dumps(asked | {"limit": limit, "last": last}).encode()
        with tempfile.TemporaryFile() as answer:
            look, pulled = None, PullResult(False, True)
            try:
                self._call(attempt, "look", payload=payload, sink=answer, timeout=seconds)
            finally:  # also after an interruption: complete frames are kept
                answer.seek(0)
                look = parse_first_observation(answer)
                if look is not None and home is not None:
                    pulled = home.take(answer)
        if look is None:
            raise HostUnreachableError(f"{self.name}: its answer is incomplete")
        return look, pulled

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
        """Run an operation of the runner there; returns its answer.

        Args:
            payload: stdin after the runner's source; or pass `source`, which begins with the runner's source.
            sink: receives stdout, including the answer; the returned answer is then empty.
        """
        parts = PARTS_BY_VERB.get(verb, RUNNER_PARTS)
        command = [self.site.python, "-IS", "-c", BOOT_PROGRAM, _part_sizes(parts), verb]
        command += ["--workspace", self.site.workspace, "--epoch", str(attempt.epoch)]
        command += ["--run", f"{attempt.run_id}node{attempt.node}" if attempt.node else attempt.run_id]
        if self.container is not None:
            command += ["--container", json.dumps(self.container.runner_arguments())]
        given = source or io.BytesIO(_part_sources(parts) + payload)
        answer = self.host.run([*command, *options], source=given, sink=sink, timeout=timeout)
        if answer.exit_code in NOT_FOUND:
            raise HostRefusedError(
                f"it has no {self.site.python}",
                where=self.name,
                remedy="set placement.site.python in the template",
            )
        if answer.exit_code == REFUSED and sink is None:
            raise self._refusal(parse_last_document(answer.output, self.name))
        if answer.exit_code == REFUSED and sink is not None:  # it cannot observe the attempt
            sink.seek(0)
            refused = parse_last_document(sink.read(), self.name).get("refused")
            raise HostUnreachableError(f"{self.name}: {str(refused)[:MAX_MESSAGE_CHARS]}")
        if answer.exit_code != 0:
            last = (answer.errors.strip().splitlines() or ["no output"])[-1]
            # Uploading again is harmless; the effect of other operations is unknown.
            kind = WorkFailedError if verb == "receive" else HostUnreachableError
            raise kind(f"the runner failed: {last}", where=self.name)
        return {} if sink is not None else parse_last_document(answer.output, self.name)

    def _refusal(self, answer: Mapping[str, Any]) -> Exception:
        what, kind = str(answer.get("refused"))[:MAX_MESSAGE_CHARS], answer.get("kind")
        if kind == "disk_full":
            remedy = "free some space there, or set another workspace"
            error = RequestError(what, where=self.name, remedy=remedy)
            error.__cause__ = OSError(28, what)
            return error
        if kind == "workspace":
            remedy = "set placement.site.workspace to a folder that you may write there"
            return RequestError(what, where=self.name, remedy=remedy)
        kinds = {"superseded": _SupersededError, "stalled": HostUnreachableError}
        return kinds.get(str(kind), WorkFailedError)(f"{self.name}: {what}")


class _SupersededError(WorkFailedError):
    """A newer attempt has started there."""


def _part_sizes(parts: Sequence[str]) -> str:
    """Return the names and sizes of the modules, for `BOOT_PROGRAM`."""
    names = [*(f"{PACKAGE}.{part}" for part in parts[:-1]), PROGRAM]
    return ",".join(f"{name}:{len(_part_sources([part]))}" for name, part in zip(names, parts, strict=True))


def _part_sources(parts: Sequence[str]) -> bytes:
    return b"".join(remote_source(f"{part}.py") for part in parts)


def _pulled_folders(attempt: Assignment) -> Sequence[str]:
    """Return the folders to pull: evidence from the leading machine, logs and verdicts from others."""
    return ("runtime", "artifacts") if attempt.node == 0 else ("runtime",)
