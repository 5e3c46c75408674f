"""Monte Carlo values: continue answers from their prefixes, and score the continuations."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.environments.core.protocol import Score, Task, Transcript
from perilune.rollout.worker import RolloutWorker
from perilune.watchdog import STALL_SECONDS, Watchdog


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A task, its prompt int32[P], and the first tokens int32[t] of an answer."""

    task: Task
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]


def score_continuations(
    rollouts: RolloutWorker, prefixes: Sequence[Prefix], count: int, params: SamplingParams, step: int
) -> list[NDArray[np.float64]]:
    """Return the rewards float64[count] of `count` continuations of each prefix, NaN for failures.

    An answer has at most `params.max_tokens` tokens, with those of its prefix, and ends at the environment's
    stop texts too. Equal prefixes are continued once. The random numbers differ from those of all episodes.
    """
    if not prefixes:
        return []
    keys = [
        (prefix.task.task_id, prefix.prompt_ids.tobytes(), prefix.token_ids.tobytes()) for prefix in prefixes
    ]
    distinct = dict(zip(keys, prefixes, strict=True))
    longest = params.max_tokens - min(len(prefix.token_ids) for prefix in distinct.values())
    seed = int.from_bytes(hashlib.blake2b(f"montecarlo/{rollouts.seed}".encode(), digest_size=7).digest())
    prompts = [
        Prompt(
            [*prefix.prompt_ids.tolist(), *prefix.token_ids.tolist()],
            (seed, step, index),
            position=len(prefix.token_ids),  # a stop text may begin in the prefix
        )
        for index, prefix in enumerate(distinct.values())
    ]
    stops = [rollouts.add_stop_texts(params, prefix.task).stop for prefix in distinct.values()]
    completions: dict[int, list[Completion]] = {}
    with Watchdog("sampling") as wait:
        for stop in dict.fromkeys(stops):
            chosen = [index for index, own in enumerate(stops) if own == stop]
            own_params = replace(params, max_tokens=longest, stop=stop)
            sampled = rollouts.engine.sample(
                [prompts[index] for index in chosen], count, own_params, lambda *_: wait.progress()
            )
            completions |= zip(chosen, sampled, strict=True)
    items = []
    for index, prefix in enumerate(distinct.values()):
        room = params.max_tokens - len(prefix.token_ids)
        for sample in completions[index]:
            tokens = [*prefix.token_ids.tolist(), *sample.token_ids[:room].tolist()]
            finished = sample.finish_reason == "stop" and len(sample.token_ids) <= room
            items.append((prefix.task, Transcript(rollouts.tokenizer.decode(tokens), finished=finished)))
    with Watchdog("scoring", STALL_SECONDS + 2 * len(items) * rollouts.scorer.item_seconds):
        outcomes = rollouts.scorer.score(items)
    rewards = [outcome.reward if isinstance(outcome, Score) else np.nan for outcome in outcomes]
    by_key = dict(zip(distinct, np.array(rewards).reshape(len(distinct), count), strict=True))
    return [by_key[key] for key in keys]
