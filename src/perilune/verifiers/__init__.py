"""What an episode is worth, judged in a process of its own."""

from perilune.verifiers.confinement import ScorerLimits
from perilune.verifiers.scorer import Scorer

__all__ = ["Scorer", "ScorerLimits"]
