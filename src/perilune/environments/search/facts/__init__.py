"""Questions about a generated corpus of companies, their heads and cities."""

from perilune.environments.search.facts.environment import FactsEnvironment

__all__ = ["FactsEnvironment"]
