"""What can be seen of an attempt from its files and its process table. Seeing changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perilune.errors import RequestError
from perilune.execution.claim import Claim, read_claim
from perilune.execution.processes import Presence
from perilune.execution.verdict import Verdict, read_verdict
from perilune.files import read_json


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at an attempt.

    Attributes:
        claim: of this very epoch, or None.
        worker: whether the claiming worker lives; UNKNOWN also when there is no claim.
        verdict: of this very epoch, or None.
        superseded: whether a newer attempt has claimed the same place.
        heartbeat: the worker's last count of seconds, 0 before the first.
        unseen: why nothing could be seen at all; "" when the place was looked at.
        refused: whether that is because the place is the wrong machine or lets nobody in.
        more: whether something may be there that has not come home along with this look, and a pull brings.
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
    def hidden(self) -> bool:
        """Whether it cannot be told what the attempt does. That justifies nothing."""
        return bool(self.unseen) or (self.claim is not None and self.worker is Presence.UNKNOWN)


def observe_files(bundle: Path, epoch: int) -> Observation:
    """Look at the attempt `epoch` that runs in `bundle`.

    The process is looked at before the verdict: a worker seen dead has written all it ever will.

    Raises:
        RequestError: when its claim or verdict is damaged.
    """
    runtime = bundle / "runtime"
    claim = read_claim(runtime)
    if claim is None or claim.epoch != epoch:
        return Observation(superseded=claim is not None and claim.epoch > epoch)
    worker = claim.process.presence()
    verdict = read_verdict(runtime, epoch)
    return Observation(claim, worker, verdict, heartbeat=_heartbeat(runtime, epoch))


def _heartbeat(runtime: Path, epoch: int) -> int:
    try:
        beat = read_json(runtime / "heartbeat.json")
    except RequestError:
        return 0
    return int(beat["count"]) if beat.get("epoch") == epoch else 0
