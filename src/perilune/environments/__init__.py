"""Environments: the protocol, built-in environments, and adapters to other packages."""

from perilune.environments.core.agents import AgentProgram, Programs, gather, sample
from perilune.environments.core.episode_totals import EpisodeTotals
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.multi_turn import EpisodeGenerator, MultiTurn, ask, end_episode
from perilune.environments.core.protocol import (
    AgentTurn,
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

__all__ = [
    "AgentProgram",
    "AgentTurn",
    "Environment",
    "EpisodeFailedError",
    "EpisodeGenerator",
    "EpisodeTotals",
    "Failure",
    "KeyedRandom",
    "Message",
    "MultiTurn",
    "Observation",
    "Outcome",
    "Programs",
    "Score",
    "Session",
    "SingleTurn",
    "Split",
    "Task",
    "Transcript",
    "ask",
    "end_episode",
    "environment_ids",
    "gather",
    "make_environment",
    "sample",
]
