"""Algorithms by name. An algorithm is one class: its options, and the token weights of a group of episodes.

Nothing here imports torch: weights are computed from rewards with numpy.
"""

from typing import Annotated, Any, get_args

from pydantic import Field, ValidationError

from perilune.errors import RequestError, did_you_mean
from perilune.extensions import CodeReference
from perilune.frozen import invalid_value
from perilune.learn.algorithms.base import Algorithm, StepContext
from perilune.learn.algorithms.dgpo import DGPO
from perilune.learn.algorithms.extension import OrExtension
from perilune.learn.algorithms.gigpo import GiGPO
from perilune.learn.algorithms.group_relative import CISPO, DAPO, GRPO, GSPO, RLOO, DrGRPO, MaxRL
from perilune.learn.algorithms.pass_at_k import PKPO, PassAtKTraining
from perilune.learn.algorithms.ppo import PPO
from perilune.learn.algorithms.reinforce import ReinforcePP, ReinforcePPBaseline
from perilune.learn.algorithms.sft import SFT
from perilune.learn.algorithms.toggle import Toggle
from perilune.learn.name_or_section import NameOrSection

__all__ = ["ALGORITHMS", "RL_ALGORITHMS", "Algorithm", "RLAlgorithm", "StepContext", "algorithm"]

_Section = Annotated[
    GRPO
    | DrGRPO
    | RLOO
    | ReinforcePP
    | ReinforcePPBaseline
    | DAPO
    | GSPO
    | CISPO
    | MaxRL
    | PPO
    | DGPO
    | GiGPO
    | PKPO
    | PassAtKTraining
    | Toggle,
    Field(discriminator="name"),
]

RL_ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.model_fields["name"].default: kind for kind in get_args(get_args(_Section)[0])
}
"""The algorithms of rl stages, by name."""

ALGORITHMS: dict[str, type[Algorithm]] = {**RL_ALGORITHMS, "sft": SFT}


RLAlgorithm = Annotated[_Section, NameOrSection(RL_ALGORITHMS), OrExtension(RL_ALGORITHMS), CodeReference()]
"""Type of a field that holds an algorithm: `grpo`, `{name: grpo, clip_high: 0.2}`, or a user's algorithm."""


def algorithm(name: str, **options: Any) -> Algorithm:
    """Return the algorithm `name` with its options.

    Raises:
        RequestError: when the algorithm or an option is unknown, or an option has an invalid value.
    """
    if name not in ALGORITHMS:
        raise RequestError(f"no algorithm is called '{name}'", remedy=did_you_mean(name, ALGORITHMS))
    try:
        return ALGORITHMS[name].model_validate({"name": name, **options})
    except ValidationError as error:
        known = ", ".join(field for field in ALGORITHMS[name].model_fields if field != "name")
        raise invalid_value(error, where=name, remedy=f"options: {known}") from None
