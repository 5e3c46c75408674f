"""The three state machines: which state of a run, an attempt or a machine may follow which. Anything else
raises.

A run is what was wanted. An attempt is one try on one machine; its number is the fencing epoch. A machine is
what is rented for an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class RunState(StrEnum):
    """What became of a wish."""

    QUEUED = "queued"
    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether nothing can follow."""
        return not RUN_TRANSITIONS[self]


class AttemptState(StrEnum):
    """How far one try has come."""

    PLANNED = "planned"
    PROVISIONING = "provisioning"
    STAGING = "staging"
    STARTING = "starting"
    RUNNING = "running"
    FINALIZING = "finalizing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
    LOST = "lost"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether nothing can follow."""
        return not ATTEMPT_TRANSITIONS[self]


class MachineState(StrEnum):
    """How far the life of a rented machine has come. That it cannot be reached is no state."""

    REQUESTED = "requested"
    READY = "ready"
    DRAINING = "draining"  # its attempt has ended or must leave; what it holds is still being fetched
    TERMINATING = "terminating"  # it is to go, and is asked to again and again until that is proven
    GONE = "gone"  # two looks of its provider, some time apart, found it ended or absent


class Reachability(StrEnum):
    """Whether the machine of an attempt answers. A condition, never an outcome."""

    UNKNOWN = "unknown"
    REACHABLE = "reachable"
    UNREACHABLE = "unreachable"


class Cleanup(StrEnum):
    """Whether what an attempt left behind (processes, later machines) is gone."""

    NONE = "none"
    PENDING = "pending"
    DONE = "done"


R, A, M = RunState, AttemptState, MachineState

RUN_TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    R.QUEUED: frozenset({R.ACTIVE, R.FAILED, R.CANCELLED}),
    R.ACTIVE: frozenset({R.QUEUED, R.SUCCEEDED, R.FAILED, R.CANCELLED}),
    R.SUCCEEDED: frozenset(),
    R.FAILED: frozenset(),
    R.CANCELLED: frozenset(),
}

_ANY_TIME = frozenset({A.PREEMPTED, A.LOST, A.CANCELLED})  # from every live state

ATTEMPT_TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = {
    A.PLANNED: frozenset({A.PROVISIONING, A.STAGING}) | _ANY_TIME,
    A.PROVISIONING: frozenset({A.STAGING, A.FAILED}) | _ANY_TIME,
    A.STAGING: frozenset({A.STARTING, A.FAILED}) | _ANY_TIME,
    A.STARTING: frozenset({A.RUNNING, A.FINALIZING, A.FAILED}) | _ANY_TIME,
    A.RUNNING: frozenset({A.FINALIZING, A.FAILED}) | _ANY_TIME,
    A.FINALIZING: frozenset({A.SUCCEEDED, A.FAILED}) | _ANY_TIME,
    A.SUCCEEDED: frozenset(),
    A.FAILED: frozenset(),
    A.PREEMPTED: frozenset(),
    A.LOST: frozenset(),
    A.CANCELLED: frozenset(),
}

MACHINE_TRANSITIONS: Mapping[MachineState, frozenset[MachineState]] = {
    M.REQUESTED: frozenset({M.READY, M.TERMINATING, M.GONE}),
    M.READY: frozenset({M.DRAINING, M.TERMINATING, M.GONE}),
    M.DRAINING: frozenset({M.TERMINATING, M.GONE}),
    M.TERMINATING: frozenset({M.GONE}),
    M.GONE: frozenset({M.TERMINATING}),  # only when its provider shows it again: it had not been gone
}


class IllegalTransitionError(RuntimeError):
    """A state was about to follow one that it cannot follow: a defect of ours, never of the user."""


def check_run(old: RunState, new: RunState) -> None:
    """Raise IllegalTransitionError unless a run may go from `old` to `new`."""
    if new not in RUN_TRANSITIONS[old]:
        raise IllegalTransitionError(f"run: {old} -> {new}")


def check_attempt(old: AttemptState, new: AttemptState) -> None:
    """Raise IllegalTransitionError unless an attempt may go from `old` to `new`."""
    if new not in ATTEMPT_TRANSITIONS[old]:
        raise IllegalTransitionError(f"attempt: {old} -> {new}")


def check_machine(old: MachineState, new: MachineState) -> None:
    """Raise IllegalTransitionError unless a machine may go from `old` to `new`."""
    if new not in MACHINE_TRANSITIONS[old]:
        raise IllegalTransitionError(f"machine: {old} -> {new}")
