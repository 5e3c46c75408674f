"""Placement of an attempt on several machines: one worker on each, which start, rendezvous and end together.

The first machine leads: its files are the evidence. Of the others, logs and verdicts are collected in
runtime/node-K. If the worker on one machine fails, the attempt ends on all.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from perilune.execution.observation import Observation
from perilune.execution.placements.protocol import Assignment, Capabilities, Placement, StagingRequest
from perilune.execution.processes import Presence
from perilune.execution.verdict import Cause

T = TypeVar("T")
MAX_CONCURRENT_CALLS = 8


class GangPlacement:
    """Runs an attempt on all of `members` together.

    Args:
        name, launcher: as for every placement.
        members: a placement on each machine, the leading one first; None for a machine that is gone or was
            never ready, on which nothing runs.
    """

    capabilities = Capabilities(is_remote=True, look_interval_s=1.0)

    def __init__(self, name: str, launcher: str, members: Sequence[Placement | None]) -> None:
        self.name, self.launcher, self.members = name, launcher, members

    def stage(self, attempt: Assignment, request: StagingRequest) -> str:
        """Implement `Placement.stage`; the working copy is made once, with the leading machine."""

        def stage(member: Placement, there: Assignment) -> str:
            return member.stage(there, request)

        (notice,) = self._call_each(attempt, stage, nodes=range(1))
        self._call_each(attempt, stage, nodes=range(1, len(self.members)))
        return notice

    def start(self, attempt: Assignment) -> None:
        """Implement `Placement.start`, on all machines; it does not affect workers that already run."""
        self._call_each(attempt, lambda member, there: member.start(there))

    def is_starting(self, attempt: Assignment) -> bool:
        """Return False, because `start` waits for the claims."""
        return False

    def observe(self, attempt: Assignment) -> Observation:
        """Implement `Placement.observe`; combines the observations of all machines."""
        return combine_observations(self._call_each(attempt, lambda member, there: member.observe(there)))

    def pull(self, attempt: Assignment, *, whole: bool = False) -> None:
        if whole:  # the evidence is complete only once all machines have stopped
            self.stop(attempt)
        self._call_each(attempt, lambda member, there: member.pull(there, whole=whole))

    def stop(self, attempt: Assignment) -> bool:
        return all(self._call_each(attempt, lambda member, there: member.stop(there)))

    def remove(self, attempt: Assignment) -> None:
        self._call_each(attempt, lambda member, there: member.remove(there))

    def _call_each(
        self,
        attempt: Assignment,
        act: Callable[[Placement, Assignment], T],
        nodes: Sequence[int] | None = None,
    ) -> list[T]:
        """Return the results of `act` for each existing machine. All run before a failure is raised."""
        there = [
            (member, replace(attempt, node=node))
            for node, member in enumerate(self.members)
            if member is not None and (nodes is None or node in nodes)
        ]
        with ThreadPoolExecutor(min(len(there), MAX_CONCURRENT_CALLS) or 1) as workers:
            asked = [workers.submit(act, *call) for call in there]
        return [future.result() for future in asked]


def combine_observations(looks: Sequence[Observation]) -> Observation:
    """Combine the observations of an attempt's machines.

    The attempt has started once all machines have. It has succeeded once all have, and failed as soon as one
    has failed for a reason of its own, rather than because it lost another.
    """
    for bad in ("superseded", "unseen"):
        for look in looks:
            if getattr(look, bad):
                return look
    failed = [(node, look) for node, look in enumerate(looks) if _has_failed(look)]
    running = any(look.verdict is None and not _has_failed(look) for look in looks)
    if failed and (not running or any(not _has_lost_another(look) for _, look in failed)):
        node, look = min(failed, key=lambda pair: _has_lost_another(pair[1]))
        if look.verdict is None:
            return look
        message = f"machine {node} of {len(looks)}: {look.verdict.message}"
        return replace(look, verdict=replace(look.verdict, message=message))
    if any(look.claim is None for look in looks):
        return Observation()
    leader = looks[0]
    ended = all(look.verdict is not None for look in looks)
    worker = leader.worker
    if not ended:  # workers that are not PRESENT here are UNKNOWN: an ABSENT one was handled as a failure
        present = all(look.worker is Presence.PRESENT for look in looks if look.verdict is None)
        worker = Presence.PRESENT if present else Presence.UNKNOWN
    heartbeat = min(look.heartbeat for look in looks)
    verdict = leader.verdict if ended else None
    more = any(look.more for look in looks)
    return Observation(leader.claim, worker, verdict, heartbeat=heartbeat, more=more)


def _has_failed(observation: Observation) -> bool:
    if observation.verdict is not None:
        return not observation.verdict.succeeded
    return observation.claim is not None and observation.worker is Presence.ABSENT


def _has_lost_another(observation: Observation) -> bool:
    return observation.verdict is not None and observation.verdict.cause == Cause.PROCESS_LOST
