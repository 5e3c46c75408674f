"""Learning rates over time."""

from __future__ import annotations

import math

from perilune.learn.settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int, total: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of `total`.

    Linear warm-up over `warmup` steps (the first is lr / warmup, never 0), then a cosine from lr down to
    `final_lr` * lr at the last step; constant when `final_lr` is 1. Warm-up is not optional decoration: the
    first steps of AdamW without second moments can destroy a fresh policy.
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    span = max(total - 1 - settings.warmup, 1)
    progress = min((step - settings.warmup) / span, 1.0)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * cosine)
