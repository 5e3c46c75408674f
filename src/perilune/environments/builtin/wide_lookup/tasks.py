"""Draws wide lookups: the values of K keys that are hidden in K shards.

A key is a capital letter and its value a digit. They stand next to each other somewhere in the small letters
of the key's shard: A has the value 7 if its shard is `kqzA7mre`.
"""

import random
import string
from collections.abc import Iterator
from itertools import count
from typing import Any

from perilune.environments.builtin.wide_lookup.settings import WideLookupSpec
from perilune.environments.core.protocol import Message, Split, Task
from perilune.environments.core.splits import select_unique
from perilune.files import canonical_json, sha256_bytes


def draw_tasks(spec: WideLookupSpec, split: Split, seed: int) -> Iterator[Task]:
    """Yield distinct tasks without end."""
    drawn = (_draw_data(spec, random.Random(f"wide_lookup/{seed}/{index}")) for index in count())
    digests = ((sha256_bytes(canonical_json(data)), data) for data in drawn)
    for digest, data in select_unique(split, digests):
        keys = list(data["values"])
        yield Task(digest[:32], make_prompt(keys), data, difficulty=float(len(keys)))


def make_prompt(keys: list[str]) -> tuple[Message, ...]:
    """Return the prompt that asks for keys. A sub-agent has that of a task with its keys."""
    return ({"role": "user", "content": "".join(keys) + "\n"},)


def _draw_data(spec: WideLookupSpec, draw: random.Random) -> dict[str, Any]:
    keys = draw.sample(string.ascii_uppercase, draw.choice(spec.keys))
    values = {key: draw.choice(string.digits) for key in keys}
    return {
        "shards": {key: _hide(key + values[key], spec.letters, draw) for key in keys},
        "values": values,
    }


def _hide(entry: str, letters: int, draw: random.Random) -> str:
    text = "".join(draw.choices(string.ascii_lowercase, k=letters))
    offset = draw.randint(0, letters)
    return text[:offset] + entry + text[offset:]
