"""Tasks that need a search in a corpus, from code or with single function calls."""

from perilune.environments.search.environment import SearchEnvironment

__all__ = ["SearchEnvironment"]
