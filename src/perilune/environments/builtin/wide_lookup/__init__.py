"""Values of K keys in K shards, read by one agent or by sub-agents that it spawns and joins."""

from perilune.environments.builtin.wide_lookup.environment import WideLookupEnvironment
from perilune.environments.builtin.wide_lookup.settings import WideLookupSpec

__all__ = ["WideLookupEnvironment", "WideLookupSpec"]
