"""Claims: at most one worker runs a bundle at a time, and never for an older attempt than was seen."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perilune.bundle.storage import storage_errors
from perilune.errors import RequestError
from perilune.execution.processes import Presence, ProcessIdentity, find_marked, kill_all
from perilune.files import canonical_json, fsync_directory, locked, read_json

CLAIM_VARIABLE = "PERILUNE_CLAIM"  # environment variable of every process of an attempt: its claim's nonce
TERMINATE_GRACE_S = 2.0  # seconds between TERM and KILL for processes of an attempt whose worker is dead


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one process to run a bundle as attempt `epoch`."""

    epoch: int
    host: str
    boot_id: str
    pid: int
    starttime: int
    nonce: str

    @property
    def process(self) -> ProcessIdentity:
        """The worker that holds the claim."""
        return ProcessIdentity(self.host, self.boot_id, self.pid, self.starttime)

    def end_remaining_processes(self, grace: float = TERMINATE_GRACE_S) -> bool:
        """End every process started under this claim; False if one cannot be ended.

        Use it once the worker itself is dead, because the worker does not carry the mark.
        """
        return kill_all(lambda: find_marked(CLAIM_VARIABLE, self.nonce), grace=grace)


def read_claim(runtime: Path) -> Claim | None:
    """Return the current claim, or None if the bundle was never claimed.

    Raises:
        RequestError: claim.json is damaged.
    """
    path = runtime / "claim.json"
    if not path.exists():
        return None
    fields: dict[str, Any] = read_json(path)
    try:
        return Claim(**fields)
    except TypeError:
        raise RequestError("not a claim", where=str(path), remedy="run a fresh copy of the bundle") from None


@contextmanager
def hold_claim(bundle: Path, epoch: int | None = None) -> Iterator[Claim]:
    """Claim the bundle for this process, and hold the claim until the block ends.

    Args:
        epoch: number of the attempt; None takes the one after the last.

    Raises:
        RequestError: a living worker holds the bundle; `epoch` is not newer than the last; or `epoch` is None
            and the bundle has a result.
    """
    runtime = bundle / "runtime"
    with ExitStack() as stack:
        with storage_errors("claim the bundle", runtime):
            runtime.mkdir(exist_ok=True)
            acquired = stack.enter_context(locked(runtime / "worker.lock"))
        previous = read_claim(runtime)
        if not acquired:
            raise _make_busy_error(bundle, previous)
        number = _admit(bundle, epoch, previous)
        if previous is not None:
            _retire_attempt(bundle, previous)
        with storage_errors("claim the bundle", runtime):
            claim = _write_claim(runtime, number)
        yield claim


def _admit(bundle: Path, epoch: int | None, previous: Claim | None) -> int:
    latest = previous.epoch if previous else 0
    if epoch is None:
        if (bundle / "runtime" / "result.json").exists():
            raise RequestError(
                f"this bundle has already run to its end (attempt {latest})",
                where=str(bundle),
                remedy=f"run a fresh copy, or pass --epoch {latest + 1} to run it again in place",
            )
        return latest + 1
    if epoch < latest:
        raise RequestError(
            f"attempt {epoch} is out of date: attempt {latest} has started",
            where=str(bundle),
            remedy="nothing to do; the newer attempt continues",
        )
    if epoch == latest:
        raise RequestError(
            f"attempt {epoch} has already been claimed and cannot start twice",
            where=str(bundle),
            remedy=f"--epoch {epoch + 1}",
        )
    return epoch


def _make_busy_error(bundle: Path, holder: Claim | None) -> RequestError:
    who = f"worker {holder.pid} (attempt {holder.epoch})" if holder else "another worker"
    return RequestError(
        f"{who} is running this bundle",
        where=str(bundle),
        remedy="wait for it to end, or stop it with `perilune cancel`",
    )


def _retire_attempt(bundle: Path, previous: Claim) -> None:
    """Make room for a newer attempt: end remaining processes of the older one, and keep its verdict aside."""
    if previous.process.presence() is not Presence.UNKNOWN and not previous.end_remaining_processes():
        raise RequestError(
            f"processes of attempt {previous.epoch} cannot be ended",
            where=str(bundle),
            remedy="restart the machine, or run a fresh copy of the bundle",
        )
    (bundle / "artifacts" / "manifest.json").unlink(missing_ok=True)
    for name in ("result", "claim"):
        with contextlib.suppress(FileNotFoundError):
            path = bundle / "runtime" / f"{name}.json"
            path.rename(path.with_name(f"{name}.{previous.epoch}.json"))


def _write_claim(runtime: Path, epoch: int) -> Claim:
    """Write claim.json completely, or fail if it exists (a hard link never replaces)."""
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    claim = Claim(epoch, me.host, me.boot_id, me.pid, me.starttime, secrets.token_hex(16))
    temporary = runtime / f".claim.{claim.nonce}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(canonical_json(asdict(claim)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        (runtime / "claim.json").hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(runtime)
    return claim
