"""Observe an attempt through its files and the process table, without changing anything."""

from dataclasses import dataclass
from pathlib import Path

from perilune.errors import RequestError
from perilune.execution.claim import Claim, read_claim
from perilune.execution.processes import Presence
from perilune.execution.verdict import Verdict, make_damaged_verdict, read_verdict
from perilune.files import finite_number, read_json_or_empty


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of an attempt.

    Attributes:
        worker: whether the claiming worker lives; UNKNOWN also without a claim.
        superseded: whether a newer attempt has claimed the same directory.
        heartbeat: the worker's last count of seconds; 0 before the first.
        unseen: why the observation failed; "" if it did not.
        refused: whether it failed because the machine is the wrong one or refuses access.
        more: whether a pull may bring files that did not come with this observation.
    """

    claim: Claim | None = None
    worker: Presence = Presence.UNKNOWN
    verdict: Verdict | None = None
    superseded: bool = False
    heartbeat: int = 0
    unseen: str = ""
    refused: bool = False
    more: bool = True

    @property
    def is_hidden(self) -> bool:
        """True if the attempt's state is unknown. Then only a time limit or the user may end the attempt."""
        return bool(self.unseen) or (self.claim is not None and self.worker is Presence.UNKNOWN)


def observe_files(bundle: Path, epoch: int) -> Observation:
    """Observe attempt `epoch`, which runs in `bundle`.

    The process is observed before the verdict: a worker seen dead writes nothing more.

    Raises:
        RequestError: the claim is damaged.
    """
    runtime = bundle / "runtime"
    claim = read_claim(runtime)
    if claim is None or claim.epoch != epoch:
        return Observation(superseded=claim is not None and claim.epoch > epoch)
    worker = claim.process.presence()
    try:
        verdict = read_verdict(runtime, epoch)
    except RequestError as error:  # a living worker may still replace the damaged file
        verdict = make_damaged_verdict(epoch, str(error)) if worker is Presence.ABSENT else None
    return Observation(claim, worker, verdict, heartbeat=_heartbeat(runtime, epoch))


def _heartbeat(runtime: Path, epoch: int) -> int:
    beat = read_json_or_empty(runtime / "heartbeat.json")
    return int(finite_number(beat.get("count")) or 0) if beat.get("epoch") == epoch else 0
