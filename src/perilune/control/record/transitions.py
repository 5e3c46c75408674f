"""The state machines of runs, attempts and machines: which state may follow which.

A run is a submitted stage. An attempt is one try of a run on one machine or a gang of machines; its number is
the fencing epoch. A machine is rented for an attempt.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """A state of a run, an attempt or a machine."""

    @property
    def is_terminal(self) -> bool:
        """True if no state can follow."""
        return self not in TRANSITIONS[type(self)]


class RunState(State):
    """The outcome of a run."""

    QUEUED = "queued"
    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class AttemptState(State):
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


class MachineState(State):
    """Life cycle of a rented machine. Being unreachable is not a state."""

    REQUESTED = "requested"
    READY = "ready"
    DRAINING = "draining"  # its attempt has ended or must leave; evidence is still being fetched
    TERMINATING = "terminating"  # its provider is asked to end it until that is proven
    GONE = "gone"  # two observations, some time apart, did not find it alive


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
_ANY_TIME = {A.PREEMPTED, A.LOST, A.CANCELLED}  # from every live state

TRANSITIONS: Mapping[type[State], Mapping[Any, set[Any]]] = {  # a state without an entry is terminal
    RunState: {
        R.QUEUED: {R.ACTIVE, R.FAILED, R.CANCELLED},
        R.ACTIVE: {R.QUEUED, R.SUCCEEDED, R.FAILED, R.CANCELLED},
    },
    AttemptState: {
        A.PLANNED: {A.PROVISIONING, A.STAGING} | _ANY_TIME,
        A.PROVISIONING: {A.STAGING, A.FAILED} | _ANY_TIME,
        A.STAGING: {A.STARTING, A.FAILED} | _ANY_TIME,
        A.STARTING: {A.RUNNING, A.FINALIZING, A.FAILED} | _ANY_TIME,
        A.RUNNING: {A.FINALIZING, A.FAILED} | _ANY_TIME,
        A.FINALIZING: {A.SUCCEEDED, A.FAILED} | _ANY_TIME,
    },
    MachineState: {
        M.REQUESTED: {M.READY, M.TERMINATING, M.GONE},
        M.READY: {M.DRAINING, M.TERMINATING, M.GONE},
        M.DRAINING: {M.TERMINATING, M.GONE},
        M.TERMINATING: {M.GONE},
        M.GONE: {M.TERMINATING},  # only if its provider lists it again
    },
}


class IllegalTransitionError(RuntimeError):
    """A bug in Perilune: a state cannot follow the one before it."""


def check_transition(old: State, new: State) -> None:
    """Raise IllegalTransitionError unless the state `old` may change to `new`."""
    if new not in TRANSITIONS[type(old)].get(old, ()):
        raise IllegalTransitionError(f"{type(old).__name__}: {old} -> {new}")
