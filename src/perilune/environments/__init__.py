"""Where episodes happen: one protocol, adapters to the ecosystems."""

from perilune.environments.chance import Chance
from perilune.environments.multi_turn import MultiTurn, Play, ask, over
from perilune.environments.protocol import (
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
from perilune.environments.registry import environment_ids, make_environment
from perilune.environments.single_turn import SingleTurn
from perilune.environments.tally import Tally

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
