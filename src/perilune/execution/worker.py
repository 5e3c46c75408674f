"""The worker: runs the task of a bundle in a separate process, and leaves a verdict.

It is a light supervisor without torch. At the end, in this order: it ends the task's process and all
descendants, makes logs durable, hashes outputs into artifacts/manifest.json, and writes runtime/result.json
last, which therefore proves that everything before it happened.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from perilune.bundle.inspection import read_job
from perilune.bundle.manifest import write_manifest
from perilune.bundle.verify import require_verified
from perilune.errors import PeriluneError, RequestError
from perilune.execution.claim import CLAIM_VARIABLE, Claim, hold_claim
from perilune.execution.hardware import HardwareSampler
from perilune.execution.processes import adopt_orphans, die_with_parent, kill_all
from perilune.execution.ranks import Node, Ranks, write_logs
from perilune.execution.verdict import (
    RESERVE_FILE,
    Cause,
    Ending,
    Verdict,
    count_memory_kills,
    describe_error,
    find_cause,
)
from perilune.files import canonical_json, fsync_directory, read_json, write_json
from perilune.redaction import redact_output, redact_text

HEARTBEAT_SECONDS = 1.0
STOP_GRACE_S = 10.0  # seconds between TERM and KILL
RESERVE_BYTES = 1 << 16


def run_bundle(
    bundle: Path, epoch: int | None = None, *, grace: float = STOP_GRACE_S, echo: bool = False
) -> Verdict:
    """Run the bundle at `bundle` in place and return its verdict.

    Must be called from the main thread: SIGTERM and SIGINT stop the task gracefully meanwhile.

    Args:
        epoch: number of the attempt; None takes the one after the last.
        grace: seconds that the task has to exit after it was asked to stop.
        echo: copy the task's output to stdout.

    Raises:
        RequestError: there is no bundle, or its claim is refused (see `hold_claim`). A modified bundle or a
            missing secret leads to a verdict instead.
    """
    bundle = bundle.absolute()
    if not (bundle / "job.json").is_file():
        raise RequestError(
            "not a bundle: no job.json", where=str(bundle), remedy="give the folder of a bundle"
        )
    with hold_claim(bundle, epoch) as claim:
        return _Supervisor(bundle, claim, grace, echo).run()


class _Supervisor:
    """Supervises one attempt, from its claim to its verdict."""

    def __init__(self, bundle: Path, claim: Claim, grace: float, echo: bool) -> None:
        self.bundle, self.claim, self.grace, self.echo = bundle, claim, grace, echo
        self.runtime, self.artifacts = bundle / "runtime", bundle / "artifacts"
        self.reserve = self.runtime / RESERVE_FILE
        self.began = time.monotonic()
        self.stopping = False
        self.leads = True  # whether this machine is the first of the job's machines, which has the summary

    def run(self) -> Verdict:
        adopt_orphans()
        with self._stop_on_signals():
            with self._heartbeat():
                try:
                    self._prepare()
                    ending = self._run_task()
                except Exception as error:
                    if not isinstance(error, PeriluneError | OSError):
                        traceback.print_exc()
                    ending = _refused_ending(error)
                finally:
                    kill_all(_descendants, grace=0.0)
                verdict = self._conclude(ending)
            write_json(self.runtime / "result.json", asdict(verdict))  # the last file to be written
            return verdict

    def _prepare(self) -> None:
        self.artifacts.mkdir(exist_ok=True)
        self.reserve.write_bytes(bytes(RESERVE_BYTES))
        run_info = self.runtime / "run.json"
        expected = read_json(run_info)["bundle_digest"] if run_info.exists() else None
        try:
            require_verified(self.bundle, expected)
        except RequestError as error:
            raise _RejectedError(error.what, where=error.where, remedy=error.remedy) from None
        self.job = read_job(self.bundle)
        self.leads = Node.from_environment(self.job).number == 0

    def _run_task(self) -> Ending:
        ranks = Ranks(self.bundle, self.job, {CLAIM_VARIABLE: self.claim.nonce}, echo=self.echo)
        kills_before = count_memory_kills()
        try:
            ranks.start()
            with HardwareSampler(self.artifacts / "hardware.jsonl", ranks.root):
                if not ranks.wait(lambda: self.stopping):  # ask all descendants to stop, then kill them
                    kill_all(_descendants, grace=self.grace)
        finally:
            kill_all(_descendants, grace=0.0)
            ranks.close()
        return ranks.ending(stopped=self.stopping, memory_kill=count_memory_kills() > kills_before)

    def _conclude(self, ending: Ending) -> Verdict:
        """Make the evidence durable and complete, and return the verdict."""
        self.reserve.unlink(missing_ok=True)
        digest = None
        try:
            write_logs(self.bundle)
            _make_durable(self.artifacts)
            digest = write_manifest(self.bundle)
        except Exception as error:
            if ending.cause is Cause.NONE:
                full = find_cause(error) is Cause.DISK_FULL
                cause = Cause.DISK_FULL if full else Cause.ARTIFACT_INVALID
                ending = Ending(ending.exit_code, ending.signal, cause, str(error))
        if self.leads and ending.cause is Cause.NONE and not (self.artifacts / "summary.json").exists():
            ending = Ending(0, None, Cause.ARTIFACT_MISSING, "the task exited without a summary")
        return Verdict(
            self.claim.epoch,
            ending.exit_code,
            ending.signal,
            ending.cause.value,
            redact_text(ending.message),
            digest,
            round(time.monotonic() - self.began, 3),
        )

    @contextmanager
    def _stop_on_signals(self) -> Iterator[None]:
        def stop(number: int, frame: FrameType | None) -> None:
            self.stopping = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _heartbeat(self) -> Iterator[None]:
        """Count seconds in runtime/heartbeat.json while the block runs."""
        ended = threading.Event()
        path, temporary = self.runtime / "heartbeat.json", self.runtime / ".heartbeat.tmp"

        def beat() -> None:
            count = 0
            while not ended.is_set():
                count += 1
                with contextlib.suppress(OSError):  # a full disk must not end the task
                    temporary.write_bytes(canonical_json({"count": count, "epoch": self.claim.epoch}))
                    temporary.replace(path)
                ended.wait(HEARTBEAT_SECONDS)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _RejectedError(RequestError):
    """The bundle differs from what was frozen."""


def _refused_ending(error: Exception) -> Ending:
    """Return the ending of an attempt whose task never started."""
    if isinstance(error, _RejectedError):
        return Ending(None, None, Cause.BUNDLE_REJECTED, str(error))
    message = str(error) if isinstance(error, OSError) else describe_error(error)
    return Ending(None, None, find_cause(error), message)


def _descendants() -> list[psutil.Process]:
    """Return all descendants of this process, including orphans that it adopted as their subreaper."""
    return psutil.Process().children(recursive=True)


def _make_durable(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            path = Path(directory) / name
            if path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        fsync_directory(Path(directory))


def main(arguments: list[str] | None = None) -> int:
    """`python -m perilune.execution.worker BUNDLE --epoch N`: started by a launcher."""
    parser = argparse.ArgumentParser(prog="perilune worker")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--epoch", type=int, default=None)
    parser.add_argument("--grace", type=float, default=STOP_GRACE_S, help="seconds to exit after a stop")
    parser.add_argument("--tied", action="store_true", help="end when the parent process ends")
    given: Any = parser.parse_args(arguments)
    if given.tied:
        die_with_parent(os.getppid())
    with redact_output():
        try:
            verdict = run_bundle(given.bundle, given.epoch, grace=given.grace)
        except PeriluneError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except Exception:
            traceback.print_exc()  # inside the block that redacts output
            return 1
    return 0 if verdict.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
