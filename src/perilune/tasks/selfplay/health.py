"""Metrics of self-play games, and alarms for signs of a collapse."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from perilune.data.episode import Episode

WINDOW_STEPS = 8  # steps in a mean
MAX_SPOILT_SHARE = 0.25  # largest normal share of games that end by an illegal move, or are cut off
MAX_SPOILT_RATIO = 1.25  # largest normal ratio of this share to the share over the first steps
MIN_ENTROPY_RATIO = 0.02  # smallest normal ratio of the entropy to the entropy over the first steps
MIN_OPENINGS = 1.05  # effective number of first moves below which the policy has only one
NARROWING_SIGNS = ("entropy", "openings")  # signs that a policy has settled, which need not be bad


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign of a collapse, with the evidence as a message."""

    name: str
    message: str

    @property
    def is_collapse(self) -> bool:
        """True if the policy has become worse, and not only narrower."""
        return self.name not in NARROWING_SIGNS


def game_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of a step's games.

    Args:
        episodes: the episodes of the policy's players, without those of sub-agents.

    Returns:
        `illegal`, the share of games that ended by an illegal move, if the environment reports it;
        `unfinished`, the share that was cut off; `drawn`, the share of draws; `turns`, the mean number of
        turns of a player; `openings`, the `effective_number` of first moves of player 0; `seat/N/reward` and
        `seat/N/won`, the mean reward and the share of wins of player N.
    """
    judged = [episode for episode in episodes if episode.reward is not None]
    games: dict[tuple[str, ...], list[Episode]] = defaultdict(list)
    for episode in judged:
        games[_game(episode)].append(episode)
    first_players = [players[0] for players in games.values()]
    figures: dict[str, float] = {}
    metrics = [episode.metrics for episode in judged]
    with_agents = [{"turns": row["total_steps"]} if "total_steps" in row else row for row in metrics]
    by_game = [episode.metrics for episode in first_players]
    for name, lines in (("illegal", by_game), ("turns", with_agents)):
        if (mean := _mean(lines, name)) is not None:
            figures[name] = mean
    if judged:
        figures["unfinished"] = sum(episode.truncated for episode in first_players) / len(games)
        figures["drawn"] = sum(all(map(_is_drawn, players)) for players in games.values()) / len(games)
    first = [_first_move(episode) for episode in judged if episode.player == 0]
    if first:
        figures["openings"] = effective_number(Counter(first))
    for player in sorted({episode.player for episode in judged}):
        rewards = [episode.reward or 0.0 for episode in judged if episode.player == player]
        figures[f"seat/{player}/reward"] = fmean(rewards)
        figures[f"seat/{player}/won"] = sum(reward > 0 for reward in rewards) / len(rewards)
    return figures


def effective_number(counts: Mapping[str, int]) -> float:
    """Return exp of the entropy: the number of equally frequent values with the same entropy."""
    total = sum(counts.values())
    return math.exp(-math.fsum(n / total * math.log(n / total) for n in counts.values() if n))


def find_alarms(lines: Sequence[Mapping[str, float]], weaker: Sequence[str] = ()) -> list[Alarm]:
    """Return the signs of a collapse in the last steps of `lines`, the metrics of all steps.

    | sign | over the last 8 steps |
    |---|---|
    | illegal | over 25% of games ended by an illegal move, and over 1.25 times the share in the first 8 |
    | unfinished | the same for games that were cut off |
    | weaker | the policy plays worse than the initial policy did against the opponents in `weaker` |
    | entropy | below 2% of the entropy over the first 8 steps |
    | openings | only one first move is left, and the first 8 steps had more |

    Args:
        weaker: opponents against which the policy clearly plays worse than the initial policy.
    """
    signs = []
    if weaker:
        signs.append(Alarm("weaker", f"clearly worse than the initial policy against {' and '.join(weaker)}"))
    if len(lines) < WINDOW_STEPS:
        return signs
    for name in ("illegal", "unfinished"):
        first, last = _mean(lines[:WINDOW_STEPS], name), _mean(lines[-WINDOW_STEPS:], name)
        if first is not None and last is not None and last > max(MAX_SPOILT_SHARE, MAX_SPOILT_RATIO * first):
            ending = "ended by an illegal move" if name == "illegal" else "were cut off"
            signs.append(Alarm(name, f"{last:.0%} of games {ending}"))
    first, last = _mean(lines[:WINDOW_STEPS], "entropy"), _mean(lines[-WINDOW_STEPS:], "entropy")
    if first and last is not None and last < MIN_ENTROPY_RATIO * first:
        signs.append(Alarm("entropy", f"entropy fell from {first:.2g} to {last:.2g} nats"))
    first, last = _mean(lines[:WINDOW_STEPS], "openings"), _mean(lines[-WINDOW_STEPS:], "openings")
    if first and last and last < MIN_OPENINGS < first:
        signs.append(Alarm("openings", f"one first move is left of {first:.1f}"))
    return signs


def _game(episode: Episode) -> tuple[str, ...]:
    """Return the id of an episode's game: its step, task and sample."""
    return (*episode.group_id.split("/")[:2], episode.episode_id.rpartition("/")[2])


def _is_drawn(episode: Episode) -> bool:
    """Return whether a game ended without a winner, and not by an illegal move or a limit."""
    return episode.reward == 0 and not episode.truncated and not episode.metrics.get("illegal")


def _first_move(episode: Episode) -> str:
    return next((message["content"] for message in episode.messages if message["role"] == "assistant"), "")


def _mean(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [line[name] for line in lines if name in line]
    return fmean(values) if values else None
