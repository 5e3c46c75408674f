"""Lines that agents write, one command each.

?A     read the shard of key A; one shard a turn
+AB    spawn a sub-agent for the keys A and B
*      join: wait until all sub-agents have ended; see and note what they return
A7     note: the value of A is 7
.      end
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

READ, SPAWN, JOIN, END, BAD = "?", "+", "*", ".", "!"
_NOTE = re.compile(r"[A-Z][0-9]")
_SPAWN = re.compile(r"\+[A-Z]{1,26}")


@dataclass(slots=True)
class CommandReader:
    """The notes of an agent, and the effects of its lines.

    Attributes:
        shards: the shard of each key.
        notes: the value of each key, as noted last.
        reads: shards that it has read.
        bad: lines that mean nothing. The agent sees `!` for each.
        has_ended: whether it has written the end. Lines after it are not read.
        spawned: the keys of each sub-agent that the last action spawns.
        joins: whether the last action ends with a join. Lines after it are bad.
    """

    shards: Mapping[str, str]
    may_spawn: bool
    notes: dict[str, str] = field(default_factory=dict)
    reads: int = 0
    bad: int = 0
    has_ended: bool = False
    spawned: list[list[str]] = field(default_factory=list)
    joins: bool = False

    def take(self, action: str) -> list[str]:
        """Take an action; return the lines that the agent sees, without those of a join."""
        self.spawned, self.joins = [], False
        outputs: list[str] = []
        for line in action.split("\n"):
            if self.has_ended or not line:
                break
            is_first_read = not any(output != BAD for output in outputs)
            if line == END:
                self.has_ended = True
            elif not self.joins and _NOTE.fullmatch(line):
                self.notes[line[0]] = line[1]
            elif not self.joins and line[0] == READ and line[1:] in self.shards and is_first_read:
                self.reads += 1
                outputs.append(self.shards[line[1:]])
            elif not self.joins and self.may_spawn and _SPAWN.fullmatch(line):
                self.spawned.append([*line[1:]])
            elif not self.joins and self.may_spawn and line == JOIN:
                self.joins = True
            else:
                self.bad += 1
                outputs.append(BAD)
        return outputs


def serial_actions(values: Mapping[str, str], *, repeat: bool = False) -> list[str]:
    """Return the actions of an agent that reads the shards of keys one after another, and notes their values.

    Args:
        repeat: note all values again at the end.
    """
    reads = [f"{READ}{key}" for key in values]
    notes = [f"{key}{value}\n" for key, value in values.items()]
    ends = "".join(notes[:-1] if repeat else [])
    *earlier, last = map("".join, zip(notes, [*reads[1:], END], strict=True))
    return [reads[0], *earlier, ends + last]


def folding_actions(values: Mapping[str, str], every: int) -> list[str]:
    """Return serial actions that fold all notes after `every` shards, for the `context` rule policy."""
    actions = serial_actions(values, repeat=True)
    notes = [f"{key}{value}" for key, value in values.items()]
    for index in range(every, len(notes), every):
        rest = actions[index].partition("\n")[2]
        actions[index] = f"<fold>{' '.join(notes[:index])}</fold>{rest}"
    return actions
