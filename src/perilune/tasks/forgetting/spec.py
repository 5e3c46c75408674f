"""The key `forgetting` of the stages that train a policy."""

from typing import Literal

from pydantic import Field

from perilune.tasks.forgetting.settings import ForgettingSettings
from perilune.tasks.stage.defaults import ModelDefaults


class ForgettingSpec(ModelDefaults):
    """The field of stages that can measure forgetting, which they do by default for pretrained models."""

    forgetting: ForgettingSettings | Literal[False] = Field(
        False,
        description="measure forgetting by the perplexity of text, pass@1 in other environments, and KL to"
        " the initial policy; false: do not measure it, the default for new models",
    )
