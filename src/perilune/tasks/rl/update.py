"""The learner side of reinforcement learning: token weights, off-policy corrections and updates."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perilune.data.episode import Episode
from perilune.learn.algorithms import StepContext
from perilune.learn.algorithms.base import Signal
from perilune.learn.batch import PackedBatch, minibatches, pack, scatter_to_sampled
from perilune.learn.checks import check_packed, check_weights
from perilune.learn.figures import merge_updates
from perilune.learn.kl_reward import weight_groups
from perilune.learn.off_policy import OffPolicySettings, correct_weights, learning_rate_scale
from perilune.learn.process_rewards import apply_process_rewards
from perilune.learn.schedules import learning_rate
from perilune.learn.signals import SignalModels, compute_signals
from perilune.learn.trainer import Learner, add_reference_logprobs
from perilune.learn.weights import WeightedGroup
from perilune.models.decoder import Decoder
from perilune.rollout.dynamic_sampling import kept
from perilune.rollout.groups import Groups
from perilune.tasks.checks.logprobs import LogprobChecker
from perilune.tasks.checks.optimizer import OptimizerChecker
from perilune.tasks.rl.curriculum import importance_weighted
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.rounding import is_exact
from perilune.watchdog import STALL_SECONDS, Watchdog

TRUNCATED = OffPolicySettings(proximal="learner", weight="truncate")
"""Truncated importance sampling: the default where rounding separates sampler and learner."""
ON_CPU, ON_ACCELERATOR = 1.0, 0.02  # seconds a token: longer than training takes on any useful machine
PATIENCE = 20  # a step may take this many times as long a token as the slowest one before it


def deadline(tokens: int, most: float, slowest: float | None) -> float:
    """Seconds after which a step that trains on `tokens` tokens counts as stalled.

    Args:
        most: seconds a token that no step exceeds.
        slowest: seconds a token of the slowest step so far; None before the first.
    """
    return STALL_SECONDS + tokens * (most if slowest is None else min(most, PATIENCE * slowest))


def off_policy_of(spec: RLSpec, exact: bool) -> OffPolicySettings:
    """The corrections of a run; `exact` if engine and learner give the same bits."""
    return spec.off_policy or (OffPolicySettings() if exact else TRUNCATED)


def signals_of(spec: RLSpec, off_policy: OffPolicySettings) -> set[Signal]:
    """The values of each token that are computed before the updates of a step, by a forward pass each."""
    names: set[Signal] = {*spec.algorithm.needs}
    if off_policy.needs_logprobs:
        names.add("logprobs")
    if spec.kl and spec.kl_estimator == "k1_reward":
        names.add("reference_logprobs")
    return names


class PolicyUpdates:
    """Computes token weights and makes the updates of a run, with its checks.

    Args:
        reference: the policy before training, if the spec uses it.
        longest: most tokens of an episode; `max_tokens` by default.
        draws_are_known: see `LogprobChecker`.
    """

    def __init__(
        self,
        spec: RLSpec,
        learner: Learner,
        reference: Decoder | None,
        *,
        longest: int | None = None,
        draws_are_known: bool = False,
    ) -> None:
        self._spec, self._learner, self._reference = spec, learner, reference
        exact = is_exact(learner.decoder)
        self._most = ON_CPU if exact else ON_ACCELERATOR
        self._slowest: float | None = None
        self._off_policy = off_policy_of(spec, exact)
        self._longest = longest or spec.max_tokens
        self._logprobs = LogprobChecker(learner, spec.temperature, draws_are_known)
        self._optimizer = OptimizerChecker(learner, spec, getattr(spec.algorithm, "critic_lr", None))

    def make(self, groups: Groups, step: int) -> tuple[list[WeightedGroup], dict[str, float]]:
        """Make the updates of a step from its groups.

        Args:
            step: number of completed steps.

        Raises:
            WorkFailedError: when a check finds the step wrong.

        Returns:
            all weighted groups, with those that no update used, and the metrics of the updates.
        """
        tokens = sum(len(one.prompt_ids) + len(one.token_ids) for group in groups for one in group)
        began = time.monotonic()
        with Watchdog("learning", deadline(tokens, self._most, self._slowest)):
            made = self._make(groups, step)
        self._slowest = max(self._slowest or 0.0, (time.monotonic() - began) / max(tokens, 1))
        return made

    def _make(self, groups: Groups, step: int) -> tuple[list[WeightedGroup], dict[str, float]]:
        spec, learner = self._spec, self._learner
        algorithm, off_policy = spec.algorithm, self._off_policy
        self._logprobs.check_sampler(groups, step)
        signals = compute_signals(
            signals_of(spec, off_policy),
            groups,
            SignalModels(learner.decoder, self._reference, learner.critic),
            token_budget=spec.token_budget,
            temperature=spec.temperature,
            ranks=learner.ranks,
        )
        memory = learner.memory.setdefault("algorithm", {})
        context = StepContext(self._longest, spec.kl, spec.kl_estimator, step, signals, memory)
        weighted = weight_groups(algorithm, groups, context)
        centred = algorithm.centred and algorithm.compares == "group"
        check_weights(weighted, centred=centred, sparse=algorithm.sparse)
        weighted = apply_process_rewards(weighted, algorithm, context, spec.process_rewards)
        weighted = importance_weighted(weighted, spec.curriculum)
        used = kept(weighted, spec.prompts, algorithm.refills)
        corrected, measured = correct_weights(used, signals.get("logprobs", {}), off_policy, learner.version)
        lr = learning_rate(spec, step, spec.steps) * learning_rate_scale(measured, off_policy)
        updates = []
        reference_logprobs: dict[str, NDArray[np.float32]] = {}
        for part in minibatches(corrected, spec.updates_per_batch) * spec.epochs_per_batch:
            batches = pack(part, spec.token_budget, temperature=spec.temperature)
            check_packed(part, batches)
            if self._reference is not None and spec.kl:
                batches = add_reference_logprobs(batches, self._reference, learner.ranks)
                self._logprobs.check_reference(batches, self._reference, groups, step)
                reference_logprobs |= reference_by_episode(batches)
            figures = learner.forward_backward(batches)
            self._logprobs.check_learner(figures, batches, [group.episodes for group in part], step)
            with self._optimizer.watched(lr):
                figures |= learner.optim_step(lr)
            updates.append(figures)
        corrections = {f"off_policy/{name}": value for name, value in measured.items()}
        weighted = [add_reference_to_pairs(group, reference_logprobs) for group in weighted]
        return weighted, merge_updates(updates) | corrections | {"groups_learned": float(len(used))}


def reference_by_episode(batches: Sequence[PackedBatch]) -> dict[str, NDArray[np.float32]]:
    """Log-probs of the learned tokens under the reference, by id of the episode, where they are known."""
    known = [(one, one.reference_logprobs) for one in batches if one.reference_logprobs is not None]
    return {name: own for one, logprobs in known for name, own in one.split_by_episode(logprobs)}


def add_reference_to_pairs(group: WeightedGroup, known: Mapping[str, NDArray[np.float32]]) -> WeightedGroup:
    """The group with `reference_logprobs` in its episodes, where they are known."""

    def recorded(episode: Episode) -> Episode:
        own = known.get(episode.episode_id)
        return (
            episode if own is None else replace(episode, reference_logprobs=scatter_to_sampled(episode, own))
        )

    return replace(group, episodes=tuple(map(recorded, group.episodes)))
