"""Process rewards: cut episodes into segments, compute the value of each prefix, take differences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Task
from perilune.environments.core.reference_answer import ReferenceAnswer, reference_answer
from perilune.learn.prefix_values import Probe, prefix_values
from perilune.learn.process_rewards import AnswerValues, MonteCarloValues, ProcessRewardSettings
from perilune.models.decoder import Decoder
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.groups import Groups
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.process_rewards.montecarlo import Prefix, score_continuations
from perilune.tasks.process_rewards.requirements import check_process_rewards
from perilune.tasks.stage.sampling import SamplingSpec
from perilune.verifiers.segments import end_of_reasoning, segment_boundaries
from perilune.verifiers.step_rewards import compute_shaping
from perilune.watchdog import Watchdog

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentedEpisode:
    """An episode with the lengths of the prefixes at which its segments begin.

    Attributes:
        prefixes: numbers of tokens, from 0, each below T.
        stated: the right answer that the task states; None if it states none.
    """

    task: Task
    episode: Episode
    prefixes: tuple[int, ...]
    stated: ReferenceAnswer | None


@dataclass(frozen=True)
class ProcessRewards:
    """Computes the `step_rewards` of episodes; does nothing without settings.

    Args:
        rollouts: samples and scores continuations.
        token_budget: most tokens of a forward pass.

    Raises:
        RequestError: as `check_process_rewards`.
    """

    settings: ProcessRewardSettings | None
    decoder: Decoder
    rollouts: RolloutWorker
    sampling: SamplingSpec
    token_budget: int

    def __post_init__(self) -> None:
        check_process_rewards(self.settings, self.rollouts.environment)

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
        """Return `RolloutWorker.play`, with process rewards for the episodes that can have them."""
        groups = self.rollouts.play(
            tasks, samples=samples, params=params, step=step, watch=watch, first=first
        )
        return groups if self.settings is None else self.reward(tasks, groups, step, watch)

    def reward(self, tasks: Sequence[Task], groups: Groups, step: int, watch: Stopwatch) -> Groups:
        """Return the groups of these tasks, with process rewards for the episodes that can have them."""
        assert self.settings is not None
        with watch.measure("process_rewards"):
            segmented = self.segment(tasks, groups)
            weight = self.settings.weight if self.settings.role == "reward" else 1.0
            rewards = {
                segment.episode.episode_id: step_rewards(segment, weight * potentials)
                for segment, potentials in zip(segmented, self.potentials(segmented, step), strict=True)
                if potentials is not None
            }
        return [
            tuple(replace(episode, step_rewards=rewards.get(episode.episode_id)) for episode in group)
            for group in groups
        ]

    def segment(self, tasks: Sequence[Task], groups: Groups) -> list[SegmentedEpisode]:
        """Cut the scored episodes into segments."""
        by_id = {task.task_id: (task, reference_answer(self.rollouts.environment, task)) for task in tasks}
        return [
            self._segment(*by_id[episode.task_id], episode)
            for group in groups
            for episode in group
            if not episode.failure and episode.loss_mask.any()
        ]

    def potentials(self, segmented: Sequence[SegmentedEpisode], step: int) -> list[Values | None]:
        """Return Phi of each prefix, float64[prefixes]; None for an episode that cannot have values."""
        if isinstance(self.settings, MonteCarloValues):
            rewards = self.continuation_rewards(segmented, step, self.settings.continuations)
            return [prefix_means(values) for values in rewards]
        assert isinstance(self.settings, AnswerValues)
        return self.answer_values(segmented, self.settings)

    def answer_values(
        self, segmented: Sequence[SegmentedEpisode], settings: AnswerValues
    ) -> list[Values | None]:
        """Return Phi from the right answer's likelihood; None if there is none, or too long or guessable."""
        probes = [self._probe(segment, settings) for segment in segmented]
        possible = [probe for probe in probes if probe is not None]
        temperature = self.sampling.temperature
        with Watchdog("process rewards"):
            values = iter(
                prefix_values(self.decoder, possible, token_budget=self.token_budget, temperature=temperature)
            )
        return [None if probe is None else potential(next(values), settings) for probe in probes]

    def continuation_rewards(
        self, segmented: Sequence[SegmentedEpisode], step: int, count: int
    ) -> list[Values]:
        """Return float64[prefixes, count] rewards of continuations of each prefix, NaN for failures."""
        prefixes = [
            Prefix(segment.task, segment.episode.prompt_ids, segment.episode.token_ids[:length])
            for segment in segmented
            for length in segment.prefixes
        ]
        params = self.sampling.params(self.decoder.config.eos_token_ids)
        rewards = iter(score_continuations(self.rollouts, prefixes, count, params, step))
        return [np.array([next(rewards) for _ in segment.prefixes]) for segment in segmented]

    def _segment(self, task: Task, stated: ReferenceAnswer | None, episode: Episode) -> SegmentedEpisode:
        pieces = [self._bytes[token] or b"" for token in episode.token_ids.tolist()]
        opens = () if stated is None else stated.opens
        forms = stated.forms if stated is not None and isinstance(self.settings, AnswerValues) else ()
        assert self.settings is not None
        stop = end_of_reasoning(pieces, opens, forms)
        cuts = segment_boundaries(pieces, episode.logprobs, stop, self.settings.segments)
        return SegmentedEpisode(task, episode, (0, *_with_own_tokens(cuts, episode.loss_mask)), stated)

    def _probe(self, segmented: SegmentedEpisode, settings: AnswerValues) -> Probe | None:
        stated, prefixes, episode = segmented.stated, segmented.prefixes, segmented.episode
        if stated is None:
            return None
        lead = stated.lead if settings.lead is None else settings.lead
        endings = _endings(self.rollouts.tokenizer, lead, stated.forms)
        longest = prefixes[-1] + max(len(ending) for ending, _ in endings)
        room = self.decoder.config.max_position_embeddings - len(episode.prompt_ids)
        if longest > room or not all(answer for _, answer in endings):
            return None
        return Probe(episode, prefixes, [ending for ending, _ in endings], [answer for _, answer in endings])

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        return self.rollouts.tokenizer.token_bytes()


@lru_cache(maxsize=1024)
def _endings(tokenizer: Tokenizer, lead: str, forms: tuple[str, ...]) -> list[tuple[list[int], int]]:
    """Return for each form of the answer the tokens of lead and answer, and the answer's token count.

    A token with parts of both belongs to the answer.
    """
    before, *wholes = tokenizer.encode_batch([lead, *(lead + form for form in forms)])
    return [(whole, len(whole) - _common_prefix(before, whole)) for whole in wholes]


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens that both start with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def potential(values: Values, settings: AnswerValues) -> Values | None:
    """Return Phi of mean log-probs V: exp(V), or V clipped at `floor` and scaled by it; None if guessable."""
    if np.exp(values[0]) > settings.guessable:
        return None
    if settings.floor is None:
        return np.exp(values)
    return np.asarray(np.clip(values, settings.floor, 0.0) / -settings.floor)


def prefix_means(rewards: Values) -> Values | None:
    """Return the mean reward of each prefix; None if all continuations of one failed."""
    if np.isnan(rewards).all(axis=1).any():
        return None
    return np.asarray(np.nanmean(rewards, axis=1))


def step_rewards(segmented: SegmentedEpisode, potentials: Values) -> NDArray[np.float32]:
    """Return float32[T]: Phi(after) - Phi(before) at segments' last tokens, Phi = 0 at the end; else NaN."""
    differences = compute_shaping(np.append(potentials, 0.0), (-np.inf, np.inf))
    mask = segmented.episode.loss_mask
    rewards = np.full(len(mask), np.nan, np.float32)
    indices = np.flatnonzero(mask)
    ends = [*segmented.prefixes[1:], len(mask)]
    rewards[indices[np.searchsorted(indices, ends) - 1]] = differences
    return rewards


def _with_own_tokens(cuts: Sequence[int], mask: NDArray[np.bool_]) -> list[int]:
    """Return the cuts that leave a token of the policy in every segment."""
    kept: list[int] = []
    for cut in cuts:
        if mask[kept[-1] if kept else 0 : cut].any() and mask[cut:].any():
            kept.append(cut)
    return kept
