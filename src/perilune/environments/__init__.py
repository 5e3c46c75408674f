"""Where episodes happen: one protocol, adapters to the ecosystems."""

from perilune.environments.core.chance import Chance
from perilune.environments.core.multi_turn import MultiTurn, Play, ask, over
from perilune.environments.core.protocol import (
    Environment,
    EpisodeFailedError,
    Failure,
    Message,
    Observation,
    Outcome,
    Score,
    Session,
    Split,
    Task,
    Transcript,
)
from perilune.environments.core.registry import environment_ids, make_environment
from perilune.environments.core.single_turn import SingleTurn
from perilune.environments.core.tally import Tally

__all__ = [
    "Chance",
    "Environment",
    "EpisodeFailedError",
    "Failure",
    "Message",
    "MultiTurn",
    "Observation",
    "Outcome",
    "Play",
    "Score",
    "Session",
    "SingleTurn",
    "Split",
    "Tally",
    "Task",
    "Transcript",
    "ask",
    "environment_ids",
    "make_environment",
    "over",
]
