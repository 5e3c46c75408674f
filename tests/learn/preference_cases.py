"""Random answer pairs for the tests of pairwise losses."""

import numpy as np
from learning_cases import VOCABULARY, episode

from perilune.data.episode import Episode


def random_pairs(seed: int, count: int = 5) -> list[tuple[Episode, Episode]]:
    rng = np.random.default_rng(seed)
    pairs = []
    for index in range(count):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 6))
        pair = []
        for side in range(2):
            length = int(rng.integers(1, 8))
            mask = rng.random(length) < 0.8
            mask[-1] = True
            pair.append(
                episode(
                    1.0 - side, prompt=prompt, tokens=rng.integers(0, VOCABULARY, length), mask=mask,
                    logprobs=rng.normal(-3, 0.4, length), name=f"0/{index}/{side}",
                )
            )  # fmt: skip
        pairs.append((pair[0], pair[1]))
    return pairs
