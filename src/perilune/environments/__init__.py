"""Where episodes happen: one protocol, adapters to the ecosystems."""

from perilune.environments.protocol import (
    Environment,
    Failure,
    Outcome,
    Score,
    Session,
    Split,
    Step,
    Task,
    Transcript,
)
from perilune.environments.registry import environment_ids, make_environment

__all__ = [
    "Environment",
    "Failure",
    "Outcome",
    "Score",
    "Session",
    "Split",
    "Step",
    "Task",
    "Transcript",
    "environment_ids",
    "make_environment",
]
