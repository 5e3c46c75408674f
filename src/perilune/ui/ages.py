"""The chart of the lengths of answers by the age of the weights that sampled them."""

import math

import numpy as np
from numpy.typing import NDArray

from perilune.ui.attempt import Attempt
from perilune.ui.curves import even_places
from perilune.ui.figures import MAX_BINS, Figure

MAX_FILES = 16  # steps to read


def age_chart(stage: str, attempt: Attempt) -> Figure | None:
    """Return the mean length by age; None if the sampled answers of no step differ in age.

    The age of an answer is the number of weight updates from the version of its first sampled token to the
    newest version of its step.
    """
    if not any(attempt.metrics.get("staleness", ())):
        return None
    files = attempt.episode_files
    found = [attempt.versions(files[place]) for place in even_places(len(files), MAX_FILES)]
    read = [rows for rows in found if len(rows)]
    ages = [rows[:, 1].max() - rows[:, 0] for rows in read]
    if not any(age.any() for age in ages):
        return None
    return _draw_chart(stage, len(read), np.concatenate(ages), np.concatenate([rows[:, 2] for rows in read]))


def _draw_chart(stage: str, steps: int, ages: NDArray[np.int64], lengths: NDArray[np.int64]) -> Figure:
    width = math.ceil((int(ages.max()) + 1) / MAX_BINS)
    counts = np.bincount(ages // width)
    means = np.bincount(ages // width, lengths) / np.maximum(counts, 1)
    known = np.flatnonzero(counts)
    names = [
        f"{f'{index * width} to {index * width + width - 1}' if width > 1 else index} updates, "
        f"{counts[index]:,} answers"
        for index in known.tolist()
    ]
    return {
        "kind": "bars",
        "key": f"ages-{stage}",
        "title": f"Length by policy age: {stage}",
        "note": f"Mean sampled tokens of the answers of {steps} steps, by the weight updates between their "
        "first token and the newest token of the step. An answer that takes long to sample is older.",
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
