"""The wide lookup teacher: finds all values, by itself or with a sub-agent for each key."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from perilune.data.generators.scripted import ScriptedTeacher
from perilune.environments.builtin.wide_lookup.lines import END, JOIN, SPAWN, folding_actions, serial_actions
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Task

FOLD_EVERY = 3  # shards


class WideLookupTeacher(ScriptedTeacher):
    """Finds the value of each key.

    * serial: reads the shards one after another, and notes each value in the turn after its shard,
    * parallel: spawns a sub-agent for each key and joins them; serial if the task has a single key,
    * repeated: as serial, and notes all values again at the end,
    * folded: as repeated, and folds its notes after every third shard, for `context: {rule: policy}`.
    """

    name = "wide_lookup"
    strategies: ClassVar = {"serial": 0.9, "parallel": 0.1, "repeated": 0.0, "folded": 0.0}
    supports = ("shards", "the environment 'wide_lookup'")

    def script(self, task: Task, strategy: str, chance: KeyedRandom) -> Sequence[str]:
        """Return the actions of all agents, in the order in which the environment asks for them."""
        values: Mapping[str, str] = task.data["values"]
        if strategy == "repeated":
            return serial_actions(values, repeat=True)
        if strategy == "folded":
            return folding_actions(values, FOLD_EVERY)
        if strategy == "serial" or len(values) == 1:
            return serial_actions(values)
        lookups = zip(*(serial_actions({key: value}) for key, value in values.items()), strict=True)
        spawns = "".join(f"{SPAWN}{key}\n" for key in values) + JOIN
        return [spawns, *(action for round_ in lookups for action in round_), END]
