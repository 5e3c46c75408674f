"""From judged episodes to episodes with process rewards: cut, value every prefix, take differences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Task
from perilune.environments.core.reference_answer import ReferenceAnswer, reference_answer
from perilune.errors import RequestError
from perilune.learn.prefix_values import Probe, prefix_values
from perilune.learn.process_rewards import AnswerValues, MonteCarloValues, ProcessRewardSettings
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.process_rewards.montecarlo import Position, play_on
from perilune.tasks.stage.sampling import SamplingSpec
from perilune.verifiers.segments import end_of_reasoning, segment_boundaries
from perilune.verifiers.step_rewards import shaping
from perilune.watchdog import Waiting

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """An episode on its way through its prefixes.

    Attributes:
        prefixes: counts of its tokens, from 0, each below T.
        stated: the answer that its task states.
    """

    task: Task
    episode: Episode
    prefixes: tuple[int, ...]
    stated: ReferenceAnswer | None


@dataclass(frozen=True)
class ProcessRewards:
    """Gives episodes their `step_rewards`; does nothing without settings.

    Args:
        settings: of the recipe's `process_rewards` section.
        decoder: the policy as it sampled, for values from a forward pass.
        rollouts: who samples and judges, for values from play.
        sampling: how the episodes were sampled.
        token_budget: tokens of one forward pass.

    Raises:
        RequestError: when values from play are wanted of episodes of several turns, or the likelihood of
            the right answer where the environment states none.
    """

    settings: ProcessRewardSettings | None
    decoder: Decoder
    rollouts: RolloutWorker
    sampling: SamplingSpec
    token_budget: int

    def __post_init__(self) -> None:
        environment = self.rollouts.environment
        if isinstance(self.settings, MonteCarloValues) and getattr(environment, "max_turns", 1) > 1:
            raise RequestError(
                f"an episode of {environment.id} has several turns, and play goes on within one",
                where="process_rewards",
                remedy="leave process_rewards: montecarlo to environments of one turn",
            )
        if isinstance(self.settings, AnswerValues) and not hasattr(environment, "reference_answer"):
            raise RequestError(
                f"{environment.id} states no right answer, whose likelihood could be asked for",
                where="process_rewards",
                remedy="process_rewards: montecarlo, or none",
            )

    def play(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        params: SamplingParams,
        step: int,
        watch: Stopwatch,
        first: int,
    ) -> Groups:
        """As `Rollouts.play`, with process rewards wherever there can be any."""
        groups = self.rollouts.play(
            tasks, samples=samples, params=params, step=step, watch=watch, first=first
        )
        return groups if self.settings is None else self.reward(tasks, groups, step, watch)

    def reward(self, tasks: Sequence[Task], groups: Groups, step: int, watch: Stopwatch) -> Groups:
        """The groups of these tasks, with process rewards wherever there can be any."""
        assert self.settings is not None
        begun = time.perf_counter()
        walks = self.walks(tasks, groups)
        weight = self.settings.weight if self.settings.role == "reward" else 1.0
        potentials = self.potentials(walks, step)
        earned = {
            walk.episode.episode_id: step_rewards(walk, weight * found)
            for walk, found in zip(walks, potentials, strict=True)
            if found is not None
        }
        watch.process_rewards += time.perf_counter() - begun
        return [
            tuple(replace(one, step_rewards=earned.get(one.episode_id)) for one in group) for group in groups
        ]

    def walks(self, tasks: Sequence[Task], groups: Groups) -> list[Walk]:
        """The prefixes at which the judged episodes are looked at."""
        of_id = {task.task_id: (task, reference_answer(self.rollouts.environment, task)) for task in tasks}
        return [
            self._walk(*of_id[one.task_id], one)
            for group in groups
            for one in group
            if not one.failure and one.loss_mask.any()
        ]

    def potentials(self, walks: Sequence[Walk], step: int) -> list[Values | None]:
        """Phi of each prefix, float64[prefixes]; None where a walk can have no values."""
        if isinstance(self.settings, MonteCarloValues):
            played = self.played(walks, step, self.settings.continuations)
            return [means_of(verdicts) for verdicts in played]
        assert isinstance(self.settings, AnswerValues)
        return self.answered(walks, self.settings)

    def answered(self, walks: Sequence[Walk], settings: AnswerValues) -> list[Values | None]:
        """By how likely the right answer is; None where none is stated, it is too long or easily guessed."""
        probes = [self._probe(walk, settings) for walk in walks]
        asked = [probe for probe in probes if probe is not None]
        with Waiting("process rewards"):
            values = iter(
                prefix_values(
                    self.decoder, asked, token_budget=self.token_budget, temperature=self.sampling.temperature
                )
            )
        return [None if probe is None else potential(next(values), settings) for probe in probes]

    def played(self, walks: Sequence[Walk], step: int, count: int) -> list[Values]:
        """Verdicts on `count` continuations of each prefix, float64[prefixes, count], NaN for failures."""
        positions = [
            Position(walk.task, walk.episode.prompt_ids, walk.episode.token_ids[:prefix])
            for walk in walks
            for prefix in walk.prefixes
        ]
        params = self.sampling.params(self.decoder.config.eos_token_ids)
        verdicts = iter(play_on(self.rollouts, positions, count, params, step))
        return [np.array([next(verdicts) for _ in walk.prefixes]) for walk in walks]

    def _walk(self, task: Task, stated: ReferenceAnswer | None, episode: Episode) -> Walk:
        pieces = [self._bytes[token] or b"" for token in episode.token_ids.tolist()]
        opens = () if stated is None else stated.opens
        forms = stated.forms if stated is not None and isinstance(self.settings, AnswerValues) else ()
        assert self.settings is not None
        stop = end_of_reasoning(pieces, opens, forms)
        places = segment_boundaries(pieces, episode.logprobs, stop, self.settings.segments)
        return Walk(task, episode, (0, *_with_own_tokens(places, episode.loss_mask)), stated)

    def _probe(self, walk: Walk, settings: AnswerValues) -> Probe | None:
        if walk.stated is None:
            return None
        lead = walk.stated.lead if settings.lead is None else settings.lead
        endings = _endings(self.rollouts.tokenizer, lead, walk.stated.forms)
        longest = walk.prefixes[-1] + max(len(ending) for ending, _ in endings)
        room = self.decoder.config.max_position_embeddings - len(walk.episode.prompt_ids)
        if longest > room or not all(answer for _, answer in endings):
            return None
        return Probe(walk.episode, walk.prefixes, [e for e, _ in endings], [answer for _, answer in endings])

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        return self.rollouts.tokenizer.token_bytes()


@lru_cache(maxsize=1024)
def _endings(tokenizer: Tokenizer, lead: str, forms: tuple[str, ...]) -> list[tuple[list[int], int]]:
    """Lead and answer as the tokenizer joins them; a token that holds some of both is the answer's."""
    before, *wholes = tokenizer.encode_batch([lead, *(lead + form for form in forms)])
    return [(whole, len(whole) - _shared(before, whole)) for whole in wholes]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def potential(values: Values, settings: AnswerValues) -> Values | None:
    """Phi of mean log-probs V: exp(V), or V bounded by `floor` and divided by it; None if easily guessed."""
    if np.exp(values[0]) > settings.guessable:
        return None
    if settings.floor is None:
        return np.exp(values)
    return np.asarray(np.clip(values, settings.floor, 0.0) / -settings.floor)


def means_of(verdicts: Values) -> Values | None:
    """Mean verdict of each prefix; None where one has no verdict at all."""
    if np.isnan(verdicts).all(axis=1).any():
        return None
    return np.asarray(np.nanmean(verdicts, axis=1))


def step_rewards(walk: Walk, potentials: Values) -> NDArray[np.float32]:
    """float32[T]: Phi(after) - Phi(before) at each segment's last token, Phi = 0 at the end; else NaN."""
    earned = shaping(np.append(potentials, 0.0), (-np.inf, np.inf))
    mask = walk.episode.loss_mask
    found = np.full(len(mask), np.nan, np.float32)
    own = np.flatnonzero(mask)
    ends = [*walk.prefixes[1:], len(mask)]
    found[own[np.searchsorted(own, ends) - 1]] = earned
    return found


def _with_own_tokens(places: Sequence[int], mask: NDArray[np.bool_]) -> list[int]:
    """The cuts between which the policy wrote something, as it must have behind the last."""
    kept: list[int] = []
    for place in places:
        if mask[kept[-1] if kept else 0 : place].any() and mask[place:].any():
            kept.append(place)
    return kept
