"""The over-optimization watch: compares the trained reward with a gold score that is never trained on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import numpy as np

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.environments.core.rewards import GOLD_METRIC
from perilune.learn.signals import SignalModels, compute_signals
from perilune.metrics.overoptimisation import OveroptimisationWatch
from perilune.models.decoder import Decoder

LARGE_PARAMETERS = 10_000_000  # model size above which `kl_start` is estimated from a share of the groups
GROUP_STRIDE = 4  # one group in four, because a forward pass over all groups would take a tenth of a step


class GoldWatch:
    """Watches runs whose episodes have a gold score (`metrics["gold"]`), and does nothing otherwise.

    Create it after `TrainingLoop`: it reads the metrics of earlier attempts.

    Args:
        load_start: loads the policy before training; called at the first step with gold scores.
        temperature: sampling temperature, for log-probs.
        token_budget: tokens per forward pass.
    """

    def __init__(
        self, workspace: Workspace, load_start: Callable[[], Decoder], temperature: float, token_budget: int
    ) -> None:
        self._workspace = workspace
        self._load_start = load_start
        self._temperature, self._token_budget = temperature, token_budget
        self._start: Decoder | None = None
        self._watch = OveroptimisationWatch()
        for line in workspace.step_metrics():
            if GOLD_METRIC in line:
                self._watch.observe(line["step"], line["kl_start"], line[GOLD_METRIC])

    def observe(self, step: int, groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
        """Return a step's gold score, kl_start (nats per episode) and `OveroptimisationWatch` metrics."""
        judged = [[episode for episode in group if GOLD_METRIC in episode.metrics] for group in groups]
        judged = [group for group in judged if group]
        if not judged:
            return {}
        gold_scores = [episode.metrics[GOLD_METRIC] for group in judged for episode in group]
        gold = fmean(gold_scores)
        kl = self._kl_from_start(judged)
        was_recommended, was_alarmed = self._watch.recommended_stop, self._watch.alarm
        figures = self._watch.observe(step, kl, gold)
        if self._watch.recommended_stop != was_recommended:
            message = f"stop here: the gold score is {gold:.3f} and no longer clearly rises"
            self._report("stop_recommended", step, message)
        if self._watch.alarm != was_alarmed:
            self._report("overoptimisation", step, "ALARM: the gold score no longer rises with the reward")
        return {GOLD_METRIC: gold, "kl_start": kl, **figures}

    def _kl_from_start(self, groups: Sequence[Sequence[Episode]]) -> float:
        """Return `kl_from_start`, computing each prompt once; for a large model, from every fourth group."""
        if self._start is None:
            self._start = self._load_start()
        if sum(parameter.numel() for parameter in self._start.parameters()) > LARGE_PARAMETERS:
            groups = groups[::GROUP_STRIDE]
        # The initial policy chooses its own experts.
        unrouted = [[replace(episode, routed_experts=None) for episode in group] for group in groups]
        signals = compute_signals(
            {"logprobs"},
            unrouted,
            SignalModels(self._start),
            token_budget=self._token_budget,
            temperature=self._temperature,
        )
        return kl_from_start([episode for group in groups for episode in group], signals["logprobs"])

    def _report(self, kind: str, step: int, message: str) -> None:
        self._workspace.event(kind, step=step)
        self._workspace.log(f"step {step}: {message} (set steps to {step} in the recipe to stop there)")

    def summary(self) -> dict[str, Any]:
        """Return `gold`: the recommended stop, alarm, best step and fitted law; empty without gold scores."""
        lines = [line for line in self._workspace.step_metrics() if GOLD_METRIC in line]
        if not lines:
            return {}
        best = max(lines, key=lambda line: line[GOLD_METRIC])
        stop = self._watch.recommended_stop
        at_stop = next((line[GOLD_METRIC] for line in lines if line["step"] == stop), None)
        fit = self._watch.fit()
        return {
            "gold": {
                "first": lines[0][GOLD_METRIC],
                "best": best[GOLD_METRIC],
                "best_step": best["step"],
                "last": lines[-1][GOLD_METRIC],
                "recommended_stop": stop,
                "at_recommended_stop": at_stop,
                "alarm": self._watch.alarm,
                "fit": None
                if fit is None
                else asdict(fit) | {"peak": fit.peak if math.isfinite(fit.peak) else None},
            }
        }


def kl_from_start(
    episodes: Sequence[Episode], start_logprobs: Mapping[str, np.ndarray[tuple[int], np.dtype[np.float32]]]
) -> float:
    """Return KL(policy || start) in nats per episode: the mean over episodes of the sum of k3 over tokens.

    k3 = exp(-x) - 1 + x, where x is the policy's log-prob minus the start's; unbiased and never negative.

    Args:
        start_logprobs: float32[T] of the initial policy by episode id, for episodes with sampled tokens.
    """
    sums = []
    for episode in (episode for episode in episodes if episode.episode_id in start_logprobs):
        x = episode.logprobs.astype(np.float64) - start_logprobs[episode.episode_id]
        x = np.clip(x[episode.loss_mask], -20, 20)
        sums.append(float(np.sum(np.expm1(-x) + x)))
    return sum(sums) / len(episodes)
