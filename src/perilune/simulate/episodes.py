"""The episodes that a simulated run samples. Their lengths are an input of the simulation, not a result.

The episodes come from a finished run, step by step, or from an assumption about their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.errors import RequestError
from perilune.files import finite_number

Tokens = NDArray[np.int32]
NEARBY_STEPS = 2  # groups of a step are drawn from so many recorded steps before and after it


@dataclass(frozen=True, slots=True)
class TurnShape:
    """One turn of an episode: the tokens of the environment before it, and the tokens sampled in it."""

    observed: Tokens
    sampled: Tokens


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The episodes of one task.

    Attributes:
        prompt: the tokens of the prompt.
        episodes: the turns of each sample, at least one.
        live: whether rewards differ, so that the group has a gradient.
        waits: recorded seconds that the last answer of each episode waited; empty if unknown.
    """

    prompt: Tokens
    episodes: tuple[tuple[TurnShape, ...], ...]
    live: bool = True
    waits: tuple[float, ...] = ()

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.sampled) for episode in self.episodes for turn in episode)

    @property
    def fed(self) -> int:
        """Number of tokens that the learner computes: the prompt once, then all tokens of each episode."""
        turns = [turn for episode in self.episodes for turn in episode]
        return len(self.prompt) + sum(len(turn.observed) + len(turn.sampled) for turn in turns)

    @property
    def recorded(self) -> int:
        """Number of tokens of all episodes, each with its prompt."""
        return self.fed + (len(self.episodes) - 1) * len(self.prompt)

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs that the learner computes with full attention."""
        prompt = len(self.prompt)
        lengths = [sum(len(turn.observed) + len(turn.sampled) for turn in turns) for turns in self.episodes]
        return prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in lengths)

    @property
    def turns(self) -> int:
        """Number of sampled turns."""
        return sum(map(len, self.episodes))

    @classmethod
    def from_episodes(cls, episodes: Sequence[Episode], wait: str = "") -> GroupShape:
        """Return the shape of a recorded group.

        Args:
            wait: name of the metric with the seconds that an episode waited; "" for none.
        """
        rewards = {episode.reward for episode in episodes if episode.reward is not None}
        played = [(episode, turns) for episode in episodes if (turns := tuple(_split_turns(episode)))]
        found = [finite_number(episode.metrics.get(wait)) or 0.0 for episode, _ in played] if wait else []
        waits = tuple(max(0.0, seconds) for seconds in found)
        return cls(episodes[0].prompt_ids, tuple(turns for _, turns in played), len(rewards) > 1, waits)


def _split_turns(episode: Episode) -> Iterator[TurnShape]:
    """Yield runs of sampled tokens, each with the observed tokens before it."""
    mask, tokens = episode.loss_mask, episode.token_ids
    bounds = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(tokens)]
    observed = tokens[:0]
    for start, end in pairwise(bounds):
        if start < end and mask[start]:
            yield TurnShape(observed, tokens[start:end])
            observed = tokens[:0]
        else:
            observed = tokens[start:end]


class Lengths(Protocol):
    """A source of the episodes of a simulation.

    Attributes:
        basis: a description of the source, for reports.
    """

    basis: str

    def groups(self, step: int, count: int, samples: int) -> list[GroupShape]:
        """Return the groups of a step (from 1)."""


class RecordedLengths:
    """The episodes of a finished run.

    A step with as many groups and samples as were recorded repeats the recorded groups. Otherwise whole
    groups are drawn from nearby recorded steps, and samples from within a group, because lengths depend on
    task and step.

    Args:
        steps: the recorded groups of each step, in order.
    """

    def __init__(self, steps: Sequence[Sequence[GroupShape]], seed: int, basis: str) -> None:
        self.basis, self._steps, self._seed = basis, steps, seed

    @classmethod
    def from_folder(cls, folder: Path, seed: int, basis: str, wait: str = "") -> RecordedLengths | None:
        """Read the episodes in a folder; None if no token was sampled. `wait` is as in `from_episodes`.

        Raises:
            RequestError: when the metric `wait` is given and is zero or missing in all episodes.
        """
        from perilune.data.episodes_file import read_episodes

        steps = []
        for path in sorted(folder.glob("step-*.parquet")):
            parts = groupby(read_episodes(path), lambda episode: episode.group_id)
            groups = [GroupShape.from_episodes(list(part), wait) for _, part in parts]
            steps.append([group for group in groups if group.episodes])
        if steps and wait and not any(any(group.waits) for groups in steps for group in groups):
            remedy = "perilune data inspect FILE.parquet lists the metrics"
            what = f"the metric '{wait}' is 0 or missing in all episodes"
            raise RequestError(what, where="--wait-metric", remedy=remedy)
        return cls(steps, seed, basis) if any(steps) else None

    def groups(self, step: int, count: int, samples: int) -> list[GroupShape]:
        index = min(step, len(self._steps)) - 1
        if step <= len(self._steps) and _has_enough(exact := self._steps[index], count, samples):
            return list(exact)
        nearby = [
            group
            for steps in self._steps[max(0, index - NEARBY_STEPS) : index + NEARBY_STEPS + 1]
            for group in steps
        ] or [group for steps in self._steps for group in steps]
        rng = np.random.default_rng((self._seed, step))
        return [
            self._resample(nearby[number], samples, rng) for number in rng.integers(len(nearby), size=count)
        ]

    def _resample(self, group: GroupShape, samples: int, rng: np.random.Generator) -> GroupShape:
        if len(group.episodes) == samples:
            return group
        chosen = rng.integers(len(group.episodes), size=samples)
        waits = tuple(group.waits[index] for index in chosen) if group.waits else ()
        return GroupShape(group.prompt, tuple(group.episodes[index] for index in chosen), group.live, waits)


def _has_enough(groups: Sequence[GroupShape], count: int, samples: int) -> bool:
    return len(groups) == count and all(len(group.episodes) <= samples for group in groups)


class AssumedLengths:
    """Episodes with lognormal answers of a given mean and limit: an assumption, not a prediction.

    Args:
        means: mean number of `prompt` tokens; of `sampled` tokens of an episode (all turns), and the maximum,
            `longest`; of `turns` of an episode; and of tokens `observed` before each turn but the first.
        live: share of the groups with a gradient.
        vocabulary: number of different tokens.
    """

    def __init__(
        self, means: Mapping[str, float], seed: int, basis: str, *, live: float = 1.0, vocabulary: int = 1000
    ) -> None:
        self.basis, self._means, self._seed, self._live = basis, means, seed, live
        self._vocabulary = vocabulary

    def groups(self, step: int, count: int, samples: int) -> list[GroupShape]:
        rng = np.random.default_rng((self._seed, step))
        return [self._draw_group(samples, rng) for _ in range(count)]

    def _draw_group(self, samples: int, rng: np.random.Generator) -> GroupShape:
        means = self._means
        prompt = self._draw_tokens(max(1, round(means["prompt"])), rng)
        return GroupShape(
            prompt, tuple(self._draw_episode(rng) for _ in range(samples)), bool(rng.random() < self._live)
        )

    def _draw_episode(self, rng: np.random.Generator) -> tuple[TurnShape, ...]:
        means = self._means
        turns = max(1, round(means["turns"]))
        mean, longest = means["sampled"] / turns, max(means["longest"], means["sampled"]) / turns
        # The longest of many answers is about three standard deviations above the median.
        sigma = max(0.0, 3 - np.sqrt(max(0.0, 9 - 2 * np.log(longest / max(mean, 1e-9)))))
        lengths = rng.lognormal(np.log(max(mean, 1e-9)) - sigma**2 / 2, sigma, size=turns)
        observed = round(means.get("observed", 0.0))
        return tuple(
            TurnShape(
                self._draw_tokens(observed if number else 0, rng),
                self._draw_tokens(max(1, round(min(length, longest))), rng),
            )
            for number, length in enumerate(lengths)
        )

    def _draw_tokens(self, count: int, rng: np.random.Generator) -> Tokens:
        return rng.integers(self._vocabulary, size=count, dtype=np.int32)
