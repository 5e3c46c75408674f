"""Learning-rate schedules."""

import math

from perilune.learn.training_settings import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int, total: int) -> float:
    """Return the learning rate of all updates of training step `step` (from 0) of `total`.

    The rate rises linearly over `warmup` steps (the first is lr / warmup, never 0), and then follows the
    schedule from lr to `final_lr` * lr at the last step. The first steps of AdamW without second moments can
    destroy a policy, so use a warm-up of 0 only with `restore_optimizer`.
    """
    peak = settings.peak_lr
    if step < settings.warmup:
        return peak * (step + 1) / settings.warmup
    if settings.schedule == "constant":
        return peak
    span = max(total - 1 - settings.warmup, 1)
    progress = min((step - settings.warmup) / span, 1.0)
    decay = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (settings.final_lr + (1 - settings.final_lr) * decay)
