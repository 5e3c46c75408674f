"""Propose the next arm of a sweep from the figures of its finished arms, with Optuna.

Nothing is stored: a proposal depends on the arms so far alone, so a killed search continues where it was.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from perilune.errors import requires_extra
from perilune.recipe.axes import Axis, Settings

MAX_PROPOSALS = 20  # proposals before the search gives up finding a new arm
RANDOM_ARMS = 5  # drawn at random before the model of the figures is used


def propose_arm(
    axes: Sequence[Axis], arms: Sequence[Settings], figures: Mapping[Settings, float], *, maximize: bool
) -> Settings | None:
    """Return the settings of the next arm (TPE; Bergstra et al. 2011); None if only known arms are proposed.

    Args:
        arms: all arms so far. Their number selects the random numbers.
        figures: the final figure of each finished arm.

    Raises:
        RequestError: Optuna is not installed.
    """
    with requires_extra("search", "--search needs Optuna; --random N does not"):
        optuna = import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {axis.key: _distribution(optuna, axis) for axis in axes}
    for number in range(MAX_PROPOSALS):
        sampler = optuna.samplers.TPESampler(
            seed=len(arms) * MAX_PROPOSALS + number, n_startup_trials=RANDOM_ARMS
        )
        study = optuna.create_study(sampler=sampler, direction="maximize" if maximize else "minimize")
        for settings, figure in figures.items():
            params = {axis.key: _optuna_value(axis, item) for axis, item in zip(axes, settings, strict=True)}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=space, value=figure))
        params = study.ask(space).params
        proposed = tuple(f"{axis.key}={axis.format_value(params[axis.key])}" for axis in axes)
        if proposed not in arms:
            return proposed
    return None


def _distribution(optuna: Any, axis: Axis) -> Any:
    if axis.bounds is None:
        return optuna.distributions.CategoricalDistribution(axis.values)
    low, high = axis.bounds
    if isinstance(low, int):
        return optuna.distributions.IntDistribution(low, high)
    return optuna.distributions.FloatDistribution(low, high, log=axis.is_log)


def _optuna_value(axis: Axis, setting: str) -> str | int | float:
    text = setting.partition("=")[2]
    if axis.bounds is None:
        return text
    return int(text) if isinstance(axis.bounds[0], int) else float(text)
