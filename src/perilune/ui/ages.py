"""The chart of the lengths of answers by the age of the weights that sampled them."""

import math

import numpy as np
from numpy.typing import NDArray

from perilune.files import finite_number
from perilune.plural import plural
from perilune.ui.attempt import Attempt
from perilune.ui.curves import even_places
from perilune.ui.figures import MAX_BINS, Figure

MAX_STEPS = 16  # steps whose episodes are read


def age_chart(stage: str, attempt: Attempt) -> Figure | None:
    """Return the mean length by age; None if all answers have the same age.

    The age of an answer is the number of weight updates between sampling its first token and training on it.
    """
    steps, staleness = (attempt.metrics.get(name, ()) for name in ("step", "staleness_max"))
    oldest = dict(zip(steps, map(finite_number, staleness), strict=False))
    kept = [step for step in attempt.episode_steps if oldest.get(step) is not None]
    if not any(oldest[step] for step in kept):
        return None
    ages, lengths = [], []
    for step in [kept[place] for place in even_places(len(kept), MAX_STEPS)]:
        versions, tokens = attempt.versions(attempt.episodes_path(step)).T
        if len(versions):
            ages.append(np.maximum(0, round(oldest[step] or 0) - (versions - versions.min())))
            lengths.append(tokens)
    if not ages or not np.ptp(np.concatenate(ages)):
        return None
    return _draw_chart(stage, len(ages), np.concatenate(ages), np.concatenate(lengths))


def _draw_chart(stage: str, steps: int, ages: NDArray[np.int64], lengths: NDArray[np.int64]) -> Figure:
    width = math.ceil((int(ages.max()) + 1) / MAX_BINS)
    counts = np.bincount(ages // width)
    means = np.bincount(ages // width, lengths) / np.maximum(counts, 1)
    known = np.flatnonzero(counts)
    lows = (known * width).tolist()
    bins = [f"{low} to {low + width - 1} updates" if width > 1 else plural(low, "update") for low in lows]
    names = [f"{bin_}, {plural(count, 'answer')}" for bin_, count in zip(bins, counts[known], strict=True)]
    return {
        "kind": "bars",
        "key": f"ages-{stage}",
        "title": f"Length by policy age: {stage}",
        "note": f"Mean sampled tokens of the answers of {steps} steps, by the weight updates between sampling"
        " their first token and training on it. An answer that takes long to sample is older.",
        "x": {
            "label": "updates",
            "as": "integer",
            "centers": (known * width + (width - 1) / 2).tolist(),
            "width": width,
            "names": names,
        },
        "y": {"as": "number"},
        "series": [{"name": "mean tokens", "values": means[known].tolist(), "color": 4}],
    }
