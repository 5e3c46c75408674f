"""What games of a policy against itself say of its health, and the signs of a collapse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune.data.episode import Episode

WINDOW = 8  # steps that are averaged before anything is called a sign
MOST_SPOILT = 0.25  # share of games that may end by an illegal move, or be cut off,
MORE_SPOILT = 1.25  # or as many times the share over the first steps
LEAST_ENTROPY = 0.02  # of the entropy that training began with
ONE_OPENING = 1.05  # effective number of first moves
NARROW = ("entropy", "openings")  # signs that a policy has settled, which need not be bad


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign, and what it rests on."""

    name: str
    said: str

    @property
    def is_collapse(self) -> bool:
        """Whether the policy has become worse, and not only narrower."""
        return self.name not in NARROW


def seat_of(episode: Episode) -> int:
    """The player whose episode it is: 1 of the group "12/3/p1", 0 of "12/3"."""
    last = episode.group_id.rpartition("/")[2]
    return int(last[1:]) if last.startswith("p") else 0


def game_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Figures of a step's games.

    Returns:
        `illegal`, the share that ended by an illegal move, where the environment says so; `unfinished`, the
        share that was cut off; `drawn`, the share that nobody won; `turns` of a player; `openings`, exp of
        the entropy of what the first player does first; `seat/N/reward` and `seat/N/won` of each player.
    """
    judged = [one for one in episodes if one.reward is not None]
    figures: dict[str, float] = {}
    for name in ("illegal", "turns"):
        values = [one.metrics[name] for one in judged if name in one.metrics]
        if values:
            figures[name] = math.fsum(values) / len(values)
    if judged:
        figures["unfinished"] = sum(one.truncated for one in judged) / len(judged)
        figures["drawn"] = sum(one.reward == 0 for one in judged) / len(judged)
    first = [_first_move(one) for one in judged if seat_of(one) == 0]
    if first:
        figures["openings"] = effective_number(Counter(first))
    for seat in sorted({seat_of(one) for one in judged}):
        own = [one.reward or 0.0 for one in judged if seat_of(one) == seat]
        figures[f"seat/{seat}/reward"] = math.fsum(own) / len(own)
        figures[f"seat/{seat}/won"] = sum(reward > 0 for reward in own) / len(own)
    return figures


def effective_number(counts: Mapping[str, int]) -> float:
    """exp of the entropy: how many equally frequent things vary as much."""
    total = sum(counts.values())
    return math.exp(-math.fsum(n / total * math.log(n / total) for n in counts.values() if n))


def alarms(lines: Sequence[Mapping[str, float]], weaker: Sequence[str] = ()) -> list[Alarm]:
    """Signs of a collapse in the last steps of `lines`, one line of figures a step.

    | sign | over the last 8 steps |
    |---|---|
    | illegal | over a quarter of the games ended by an illegal move, and clearly more than over the first 8 |
    | unfinished | the same of games that were cut off |
    | weaker | lost to whom it did not lose before: `weaker` |
    | entropy | below 2% of what it was over the first 8 steps |
    | openings | one first move, where the first 8 steps had more |

    Args:
        weaker: against whom the policy now clearly plays worse than the one that training began with.
    """
    found = (
        [Alarm("weaker", f"clearly worse than it began, against {' and '.join(weaker)}")] if weaker else []
    )
    if len(lines) < WINDOW:
        return found
    for name in ("illegal", "unfinished"):
        began, last = _mean(lines[:WINDOW], name), _mean(lines[-WINDOW:], name)
        if began is not None and last is not None and last > max(MOST_SPOILT, MORE_SPOILT * began):
            how = "ended by an illegal move" if name == "illegal" else "were cut off"
            found.append(Alarm(name, f"{last:.0%} of games {how}"))
    began, last = _mean(lines[:WINDOW], "entropy"), _mean(lines[-WINDOW:], "entropy")
    if began and last is not None and last < LEAST_ENTROPY * began:
        found.append(Alarm("entropy", f"entropy is {last:.2g} nats, and was {began:.2g}"))
    began, last = _mean(lines[:WINDOW], "openings"), _mean(lines[-WINDOW:], "openings")
    if began and last and last < ONE_OPENING < began:
        found.append(Alarm("openings", f"one first move is left, of {began:.1f}"))
    return found


def _first_move(episode: Episode) -> str:
    return next((one["content"] for one in episode.messages if one["role"] == "assistant"), "")


def _mean(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return math.fsum(values) / len(values) if values else None
