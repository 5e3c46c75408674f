"""The state machines of runs, attempts and machines: which state may follow which.

A run is a submitted stage. An attempt is one try of a run on one machine or a gang of machines; its number is
the fencing epoch. A machine is rented for an attempt.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class RunState(StrEnum):
    """The outcome of a run."""

    QUEUED = "queued"
    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """True if no state can follow."""
        return self not in RUN_TRANSITIONS


class AttemptState(StrEnum):
    """The progress or outcome of an attempt."""

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
    def is_terminal(self) -> bool:
        """True if no state can follow."""
        return self not in ATTEMPT_TRANSITIONS


class MachineState(StrEnum):
    """Life cycle of a rented machine. Being unreachable is not a state."""

    REQUESTED = "requested"
    READY = "ready"
    DRAINING = "draining"  # its attempt has ended or must leave; evidence is still being fetched
    TERMINATING = "terminating"  # its provider is asked to end it until that is proven
    GONE = "gone"  # two looks at its provider, some time apart, did not find it alive


class Reachability(StrEnum):
    """The reachability of an attempt's machine. A condition, never an outcome."""

    UNKNOWN = "unknown"
    REACHABLE = "reachable"
    UNREACHABLE = "unreachable"


class Cleanup(StrEnum):
    """The removal of everything that an attempt left behind (processes, files on machines)."""

    NONE = "none"
    PENDING = "pending"
    DONE = "done"


R, A, M = RunState, AttemptState, MachineState

# No state follows one without a row.

RUN_TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    R.QUEUED: frozenset({R.ACTIVE, R.FAILED, R.CANCELLED}),
    R.ACTIVE: frozenset({R.QUEUED, R.SUCCEEDED, R.FAILED, R.CANCELLED}),
}

_ANY_TIME = frozenset({A.PREEMPTED, A.LOST, A.CANCELLED})  # from every live state

ATTEMPT_TRANSITIONS: Mapping[AttemptState, frozenset[AttemptState]] = {
    A.PLANNED: frozenset({A.PROVISIONING, A.STAGING}) | _ANY_TIME,
    A.PROVISIONING: frozenset({A.STAGING, A.FAILED}) | _ANY_TIME,
    A.STAGING: frozenset({A.STARTING, A.FAILED}) | _ANY_TIME,
    A.STARTING: frozenset({A.RUNNING, A.FINALIZING, A.FAILED}) | _ANY_TIME,
    A.RUNNING: frozenset({A.FINALIZING, A.FAILED}) | _ANY_TIME,
    A.FINALIZING: frozenset({A.SUCCEEDED, A.FAILED}) | _ANY_TIME,
}

MACHINE_TRANSITIONS: Mapping[MachineState, frozenset[MachineState]] = {
    M.REQUESTED: frozenset({M.READY, M.TERMINATING, M.GONE}),
    M.READY: frozenset({M.DRAINING, M.TERMINATING, M.GONE}),
    M.DRAINING: frozenset({M.TERMINATING, M.GONE}),
    M.TERMINATING: frozenset({M.GONE}),
    M.GONE: frozenset({M.TERMINATING}),  # only if its provider lists it again
}


class IllegalTransitionError(RuntimeError):
    """A bug in Perilune: a state cannot follow the one before it."""


TRANSITIONS: Mapping[type[StrEnum], Mapping[Any, frozenset[Any]]] = {
    RunState: RUN_TRANSITIONS,
    AttemptState: ATTEMPT_TRANSITIONS,
    MachineState: MACHINE_TRANSITIONS,
}


def check_transition(old: StrEnum, new: StrEnum) -> None:
    """Raise IllegalTransitionError unless the state `old` may change to `new`."""
    if new not in TRANSITIONS[type(old)].get(old, ()):
        raise IllegalTransitionError(f"{type(old).__name__}: {old} -> {new}")
