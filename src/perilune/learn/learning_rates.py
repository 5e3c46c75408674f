"""The default peak learning rate of a stage, which depends on the model.

A pretrained model gets the defaults of TRL 1.16 for the same stage. A model initialised here gets rates about
a hundred times as high, which would destroy a pretrained model within a few steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class DefaultLR(NamedTuple):
    """Peak learning rates for all weights of a model."""

    fresh: float
    pretrained: float


DEFAULTS = {
    "sft": DefaultLR(3e-3, 2e-5),
    "rl": DefaultLR(2e-4, 1e-6),
    "selfplay": DefaultLR(2e-4, 1e-6),
    "preference": DefaultLR(2e-4, 1e-6),
    "distill": DefaultLR(1e-3, 1e-6),
    "reward_model": DefaultLR(1e-3, 1e-4),
    "flywheel": DefaultLR(1e-3, 2e-5),
}
LORA = 10.0  # factor of the rate for an adapter of a pretrained model


def default_lr(task: str, spec: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[float, str]:
    """The default rate, and the reason for it in words.

    Args:
        task: kind of stage; an unknown kind gets the rate of rl.
        spec: the stage's fields; only `lora` matters.
        model: the recipe's model section.
    """
    rates = DEFAULTS.get(task, DEFAULTS["rl"])
    preset = model.get("preset")
    if preset:
        return rates.fresh, f"the default for a new model (preset {preset})"
    if spec.get("lora") is not None:
        return rates.pretrained * LORA, "the default for an adapter of a pretrained model"
    return rates.pretrained, "the default for a pretrained model"


def with_default_lr(task: str, spec: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stage, with the default learning rate if `lr` is null."""
    if "lr" in spec and spec["lr"] is None:
        return {**spec, "lr": default_lr(task, spec, model)[0]}
    return dict(spec)
