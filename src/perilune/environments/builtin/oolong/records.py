"""The records of a context: author, date and label of each line, drawn again whenever they are needed."""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LABEL_COUNT = 6
MONTHS_PER_YEAR = 12
DAYS_PER_MONTH = 28  # of each month, so that every date exists
MAX_LABEL_WEIGHT = 9  # of a label among a user's lines, or among those of a month; the least is 1
WORDING_COUNT = 1 << 16


class Record(NamedTuple):
    """One line.

    Attributes:
        date: 100 * month + day, such as 517 for the 17th of May.
        user: from 1.
        label: from 0 to 5.
        wording: a number that selects one of the texts of the label.
    """

    date: int
    user: int
    label: int
    wording: int


def draw_records(context: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the records that a description determines.

    Users are Zipf distributed. Half of the labels are drawn from the user's own distribution, and half from
    that of the month, so that neither users nor months resemble the whole.

    Args:
        context: "seed", "lines", "users" and "zipf".
    """
    draw = random.Random(f"oolong/records/{context['seed']}")
    users = draw.sample(range(1, context["users"] + 1), context["users"])
    rank_weights = list(itertools.accumulate(rank ** -context["zipf"] for rank in range(1, len(users) + 1)))
    user_weights = {user: _label_weights(draw) for user in users}
    month_weights = {month: _label_weights(draw) for month in range(1, MONTHS_PER_YEAR + 1)}
    labels = range(LABEL_COUNT)
    for _ in range(context["lines"]):
        (user,) = draw.choices(users, cum_weights=rank_weights)
        month, day = 1 + int(draw.random() * MONTHS_PER_YEAR), 1 + int(draw.random() * DAYS_PER_MONTH)
        weights = user_weights[user] if draw.random() < 0.5 else month_weights[month]
        (label,) = draw.choices(labels, cum_weights=weights)
        yield Record(100 * month + day, user, label, int(draw.random() * WORDING_COUNT))


def _label_weights(draw: random.Random) -> list[int]:
    return list(itertools.accumulate(draw.randint(1, MAX_LABEL_WEIGHT) for _ in range(LABEL_COUNT)))
