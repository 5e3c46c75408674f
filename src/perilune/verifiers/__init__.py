"""Scores episodes in separate, confined processes."""

from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.scorer import Scorer

__all__ = ["Scorer", "ScorerLimits"]
