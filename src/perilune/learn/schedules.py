"""Learning rates over time."""

from __future__ import annotations

import math

from perilune.learn.training_settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`.

    Linear warm-up over `warmup` steps (the first is lr / warmup, never 0), then the schedule's way from lr to
    `final_lr` * lr at the last step. The first steps of an AdamW without second moments can destroy a policy,
    so a warm-up of 0 is for those who restore them.
    """
    peak = settings.peak_lr
    if step < settings.warmup:
        return peak * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return peak
    span = max(total - 1 - settings.warmup, 1)
    progress = min((step - settings.warmup) / span, 1.0)
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (settings.final_lr + (1 - settings.final_lr) * left)
