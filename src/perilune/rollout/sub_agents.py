"""The policy of sub-agents, and whether it learns from their turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perilune.engine.backend import SamplingBackend


@dataclass(frozen=True)
class SubAgents:
    """The engine that samples the turns of sub-agents, and their use in training.

    Attributes:
        engine: a frozen policy; None for the current one.
        trained: whether the turns of the sub-agents of a task form a group that trains the policy.
    """

    engine: SamplingBackend | None = None
    trained: bool = False
