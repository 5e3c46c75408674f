"""Playing on from the middle of an answer: what a prefix is worth, by what becomes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perilune.engine.request import Prompt, SamplingParams
from perilune.environments.core.protocol import Score, Task, Transcript
from perilune.rollout.worker import RolloutWorker
from perilune.watchdog import STALL, Waiting


@dataclass(frozen=True, slots=True, eq=False)
class Position:
    """A task, its prompt int32[P], and what has been written of an answer, int32[t]."""

    task: Task
    prompt_ids: NDArray[np.int32]
    written: NDArray[np.int32]


def play_on(
    rollouts: RolloutWorker, positions: Sequence[Position], count: int, params: SamplingParams, step: int
) -> list[NDArray[np.float64]]:
    """The verdicts on `count` answers that go on from each position, float64[count], NaN for a failure.

    An answer has `params.max_tokens` tokens at most, with what was written already. Equal positions are
    played once. Random numbers are none that the step's own episodes use.
    """
    if not positions:
        return []
    keys = [(one.task.task_id, one.prompt_ids.tobytes(), one.written.tobytes()) for one in positions]
    distinct = dict(zip(keys, positions, strict=True))
    longest = params.max_tokens - min(len(one.written) for one in distinct.values())
    seed = int.from_bytes(hashlib.blake2b(f"montecarlo/{rollouts.seed}".encode(), digest_size=7).digest())
    prompts = [
        Prompt([*one.prompt_ids.tolist(), *one.written.tolist()], (seed, step, index))
        for index, one in enumerate(distinct.values())
    ]
    with Waiting("sampling") as wait:
        completions = rollouts.engine.sample(
            prompts, count, replace(params, max_tokens=longest), lambda *_: wait.progress()
        )
    items = []
    for one, group in zip(distinct.values(), completions, strict=True):
        room = params.max_tokens - len(one.written)
        for sample in group:
            tokens = [*one.written.tolist(), *sample.token_ids[:room].tolist()]
            finished = sample.finish_reason == "stop" and len(sample.token_ids) <= room
            items.append((one.task, Transcript(rollouts.tokenizer.decode(tokens), finished=finished)))
    with Waiting("scoring", STALL + 2 * len(items) * rollouts.scorer.item_seconds):
        outcomes = rollouts.scorer.score(items)
    rewards = [outcome.reward if isinstance(outcome, Score) else np.nan for outcome in outcomes]
    found = dict(zip(distinct, np.array(rewards).reshape(len(distinct), count), strict=True))
    return [found[key] for key in keys]
