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
from perilune.rollout.dynamic_sampling import select_groups
from perilune.rollout.groups import Groups, flatten
from perilune.tasks.checks.logprobs import LogprobChecker
from perilune.tasks.checks.optimizer import OptimizerChecker
from perilune.tasks.rl.curriculum import apply_importance_weights
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.stage.rounding import is_exact
from perilune.watchdog import STALL_SECONDS, Watchdog

TRUNCATED_WEIGHTS = OffPolicySettings(proximal="learner", weight="truncate")
"""Truncated importance sampling: the default when sampler and learner round differently."""
CPU_TOKEN_LIMIT_S, GPU_TOKEN_LIMIT_S = 1.0, 0.02  # seconds per token that no training step takes
MAX_SLOWDOWN = 20  # largest time per token, relative to the slowest earlier step


def stall_timeout(tokens: int, limit: float, slowest: float | None) -> float:
    """Return the seconds after which a step that trains on `tokens` tokens counts as stalled.

    Args:
        limit: most seconds per token of any step.
        slowest: seconds per token of the slowest step so far; None before the first.
    """
    return STALL_SECONDS + tokens * (limit if slowest is None else min(limit, MAX_SLOWDOWN * slowest))


def off_policy_settings(spec: RLSpec, exact: bool) -> OffPolicySettings:
    """Return the off-policy corrections of a run.

    Args:
        exact: whether Perilune's own engine and the learner give the same bits.
    """
    return spec.off_policy or (OffPolicySettings() if exact and not spec.server else TRUNCATED_WEIGHTS)


def required_signals(spec: RLSpec, off_policy: OffPolicySettings) -> set[Signal]:
    """Return the per-token signals that a step needs before its updates; each takes a forward pass."""
    names: set[Signal] = {*spec.algorithm.needs}
    if off_policy.needs_logprobs:
        names.add("logprobs")
    if spec.kl and spec.kl_estimator == "k1_reward":
        names.add("reference_logprobs")
    return names


class PolicyUpdater:
    """Computes token weights and updates the policy, with the checks of each step.

    Args:
        reference: the policy before training; None if the spec doesn't use it.
        max_episode_tokens: most tokens of an episode after its prompt; `max_tokens` by default.
        draws_are_known: see `LogprobChecker`.
    """

    def __init__(
        self,
        spec: RLSpec,
        learner: Learner,
        reference: Decoder | None,
        *,
        max_episode_tokens: int | None = None,
        draws_are_known: bool = False,
    ) -> None:
        self._spec, self._learner, self._reference = spec, learner, reference
        self._token_limit_s = CPU_TOKEN_LIMIT_S if is_exact(learner.decoder) else GPU_TOKEN_LIMIT_S
        self._slowest_token_s: float | None = None
        self._off_policy = off_policy_settings(spec, is_exact(learner.decoder))
        self._max_episode_tokens = max_episode_tokens or spec.max_tokens
        self._logprobs = LogprobChecker(
            learner,
            spec.temperature,
            draws_are_known and spec.server is None,
            spec.server.rounding if spec.server else None,
        )
        self._optimizer = OptimizerChecker(learner, spec, getattr(spec.algorithm, "critic_lr", None))

    def update(self, groups: Groups, step: int) -> tuple[list[WeightedGroup], dict[str, float]]:
        """Update the policy on the groups of a step.

        Args:
            step: number of completed steps.

        Raises:
            WorkFailedError: when a check finds the step wrong.

        Returns:
            all weighted groups, including those that no update used, and the metrics of the updates.
        """
        tokens = sum(len(episode.prompt_ids) + len(episode.token_ids) for episode in flatten(groups))
        start = time.monotonic()
        with Watchdog("learning", stall_timeout(tokens, self._token_limit_s, self._slowest_token_s)):
            result = self._update(groups, step)
        self._slowest_token_s = max(self._slowest_token_s or 0.0, (time.monotonic() - start) / max(tokens, 1))
        return result

    def _update(self, groups: Groups, step: int) -> tuple[list[WeightedGroup], dict[str, float]]:
        spec, learner = self._spec, self._learner
        algorithm, off_policy = spec.algorithm, self._off_policy
        self._logprobs.check_sampler(groups, step)
        signals = compute_signals(
            required_signals(spec, off_policy),
            groups,
            SignalModels(learner.decoder, self._reference, learner.critic),
            token_budget=spec.token_budget,
            temperature=spec.temperature,
            ranks=learner.ranks,
        )
        memory = learner.memory.setdefault("algorithm", {})
        context = StepContext(self._max_episode_tokens, spec.kl, spec.kl_estimator, step, signals, memory)
        weighted = weight_groups(algorithm, groups, context)
        centred = algorithm.centred and algorithm.compares == "group"
        check_weights(weighted, centred=centred, sparse=algorithm.sparse)
        weighted = apply_process_rewards(weighted, algorithm, context, spec.process_rewards)
        weighted = apply_importance_weights(weighted, spec.curriculum)
        used = select_groups(weighted, spec.prompts, algorithm.refills)
        corrected, measured = correct_weights(used, signals.get("logprobs", {}), off_policy, learner.version)
        lr = learning_rate(spec, step, spec.steps) * learning_rate_scale(measured, off_policy)
        updates = []
        known = signals.get("reference_logprobs", {})
        reference_logprobs = {
            episode.episode_id: known[episode.episode_id][episode.loss_mask]
            for episode in flatten(groups)
            if episode.episode_id in known
        }
        for part in minibatches(corrected, spec.updates_per_batch) * spec.epochs_per_batch:
            batches = pack(part, spec.token_budget, temperature=spec.temperature)
            check_packed(part, batches)
            if self._reference is not None and spec.kl:
                batches = add_reference_logprobs(batches, self._reference, learner.ranks)
                self._logprobs.check_reference(batches, self._reference, groups, step)
                reference_logprobs |= reference_logprobs_by_episode(batches)
            metrics = learner.forward_backward(batches)
            self._logprobs.check_learner(metrics, batches, [group.episodes for group in part], step)
            with self._optimizer.check_update(lr):
                metrics |= learner.optim_step(lr)
            updates.append(metrics)
        corrections = {f"off_policy/{name}": value for name, value in measured.items()}
        weighted = [record_reference_logprobs(group, reference_logprobs) for group in weighted]
        learned = {"groups_learned": float(sum(group.has_weights for group in corrected))}
        return weighted, merge_updates(updates) | corrections | learned


def reference_logprobs_by_episode(batches: Sequence[PackedBatch]) -> dict[str, NDArray[np.float32]]:
    """Return the reference's log-probs float32[M] of learned tokens by episode id."""
    return {
        name: logprobs
        for batch in batches
        if batch.reference_logprobs is not None
        for name, logprobs in batch.split_by_episode(batch.reference_logprobs)
    }


def record_reference_logprobs(
    group: WeightedGroup, known: Mapping[str, NDArray[np.float32]]
) -> WeightedGroup:
    """Return the group with `reference_logprobs` in each episode whose id is in `known`.

    Args:
        known: log-probs float32[M] of the M tokens that the policy sampled, by episode id.
    """

    def add(episode: Episode) -> Episode:
        own = known.get(episode.episode_id)
        return (
            episode if own is None else replace(episode, reference_logprobs=scatter_to_sampled(episode, own))
        )

    return replace(group, episodes=tuple(map(add, group.episodes)))
