"""Algorithms by name. One algorithm is one small file: its options, and what it makes of groups of episodes.

Nothing here imports torch: what a token is worth is arithmetic on rewards.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from perilune.errors import RequestError
from perilune.learn.algorithms.base import Algorithm, StepContext
from perilune.learn.algorithms.cispo import CISPO
from perilune.learn.algorithms.dapo import DAPO
from perilune.learn.algorithms.dgpo import DGPO
from perilune.learn.algorithms.dr_grpo import DrGRPO
from perilune.learn.algorithms.grpo import GRPO
from perilune.learn.algorithms.gspo import GSPO
from perilune.learn.algorithms.maxrl import MaxRL
from perilune.learn.algorithms.pass_at_k_training import PassAtKTraining
from perilune.learn.algorithms.pkpo import PKPO
from perilune.learn.algorithms.ppo import PPO
from perilune.learn.algorithms.reinforce_pp import ReinforcePP
from perilune.learn.algorithms.reinforce_pp_baseline import ReinforcePPBaseline
from perilune.learn.algorithms.rloo import RLOO
from perilune.learn.algorithms.sft import SFT
from perilune.learn.algorithms.toggle import Toggle

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
    | PKPO
    | PassAtKTraining
    | Toggle,
    Field(discriminator="name"),
]

RL_ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.model_fields["name"].default: kind for kind in get_args(get_args(_Section)[0])
}
"""What an rl stage may name."""

ALGORITHMS: dict[str, type[Algorithm]] = {**RL_ALGORITHMS, "sft": SFT}


class _OrName:
    """In a recipe the bare name stands for the section that has nothing else in it."""

    @staticmethod
    def __get_pydantic_json_schema__(core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"enum": list(RL_ALGORITHMS)}, handler(core)]}


def _section(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


RLAlgorithm = Annotated[_Section, BeforeValidator(_section), _OrName()]
"""Type of a field that holds an algorithm: `grpo`, or `{name: grpo, clip_high: 0.2}`."""


def algorithm(name: str, **options: Any) -> Algorithm:
    """The algorithm called `name`, with its options.

    Raises:
        RequestError: when there is none, naming those there are; when an option is unknown or impossible.
    """
    if name not in ALGORITHMS:
        raise RequestError(f"no algorithm called '{name}'", remedy=f"one of: {', '.join(ALGORITHMS)}")
    try:
        return ALGORITHMS[name].model_validate({"name": name, **options})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        known = ", ".join(field for field in ALGORITHMS[name].model_fields if field != "name")
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg']}", where=name, remedy=f"options: {known}") from None
