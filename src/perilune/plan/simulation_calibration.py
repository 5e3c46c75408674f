"""The coefficients of a recipe's model on this machine, for `perilune simulate`.

The engine is measured with random weights, which take the same time. The learner is measured in RL stages of
several shapes on small sums.
"""

import json
import string
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perilune.engine.engine import Engine
from perilune.errors import RequestError
from perilune.models.decoder import Decoder
from perilune.models.text.template_facts import recipe_tokenizer
from perilune.plan.calibration import (
    ENVIRONMENT,
    SUMS,
    TURNS,
    device_clock,
    machine_name,
    run_on_sums,
)
from perilune.plan.estimate import device_name
from perilune.plan.trial import try_environment
from perilune.recipe.schema import Recipe
from perilune.simulate.calibrate import fit_training, measure_steps
from perilune.simulate.times import Calibrated, MeasuredTimes, engine_digest, model_digest
from perilune.tasks.checks.preflight import MIN_LONG_RUN_STEPS
from perilune.tasks.stage.memory_plan import section_config

LARGE_MODEL = 20_000_000  # parameters from which the training steps are smaller


class Shape(NamedTuple):
    """An RL stage of the calibration.

    Attributes:
        longest: most tokens of an answer.
        long_prompt: whether each answer attends to `LONG_PROMPT`.
    """

    environment: str
    prompts: int
    samples: int
    longest: int
    long_prompt: bool = False

    def stage(self, number: int, steps: int) -> str:
        """Return the stage as a line of YAML."""
        prompting = STOP.get(self.environment, {}) | (LONG_PROMPT if self.long_prompt else {})
        environment = json.dumps({"id": self.environment, "prompting": prompting})
        return (
            f"  - {{name: rl{number}, task: rl, checkpoint: model, environment: {environment},"
            f" steps: {steps}, prompts: {self.prompts}, samples: {self.samples},"
            f" max_tokens: {self.longest}}}\n"
        )


SHAPES: tuple[Shape, ...] = (
    Shape(SUMS, 4, 4, 8),
    Shape(SUMS, 8, 8, 48),
    Shape(SUMS, 8, 8, 48, long_prompt=True),
    Shape(TURNS, 16, 8, 4),
)
SMALL_SHAPES: tuple[Shape, ...] = (
    Shape(SUMS, 2, 2, 8),
    Shape(SUMS, 4, 4, 32),
    Shape(SUMS, 4, 4, 32, long_prompt=True),
    Shape(TURNS, 4, 4, 8),
)
# A system prompt of 144 characters. All templates accept it as a part of the first question.
LONG_PROMPT = {"system": "12+34=46 " * 16, "system_as": "user"}
LONG_PROMPT_POSITIONS = 512  # of a model that has room for it and the answer
STEPS = 8  # of all shapes but the first, which has the checks of a long run
RECIPE = f"""name: calibration
model: {{model}}
environment: {{{{id: "{SUMS}"}}}}
resources: {{resources}}
stages:
{{stages}}
"""
# A model that was not trained on them rarely ends its answers, so each letter and digit does.
STOP = {TURNS: {"stop": [*string.ascii_letters, *string.digits]}}


def measure_times(
    recipe: Recipe, seconds: float, report: Callable[[str], None] = lambda text: None
) -> Calibrated:
    """Measure the coefficients of the recipe's model on this machine.

    Raises:
        RequestError: when the recipe has no language model.
        WorkFailedError: when the recipe that measures the learner fails.
    """
    if recipe.model is None:
        raise RequestError("the recipe has no language model to calibrate", where=recipe.name)
    device, section = device_name(recipe.resources), recipe.model.model_dump()
    decoder = _decoder(section, device)
    with device_clock(device) as clock:
        step, error = measure_steps(decoder, seconds, clock, report)
        publish = _publish_seconds(decoder, clock)
    report("Measuring the learner with a small recipe")
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    shapes = SMALL_SHAPES if parameters >= LARGE_MODEL else SHAPES
    if decoder.config.max_position_embeddings < LONG_PROMPT_POSITIONS:
        shapes = tuple(shape for shape in shapes if not shape.long_prompt)
    training = _measure_training(recipe, shapes)
    times = MeasuredTimes(step=step, publish=publish, **training)
    return Calibrated(
        times, model_digest(section), describe_device(device), engine_digest(), round(time.time(), 3), error
    )


def describe_device(device: str) -> str:
    """Describe this machine and one of its devices (as `device_name` returns it)."""
    return f"{machine_name()}, {device if device == 'cuda' else f'threads {device}'}"


def _decoder(section: Mapping[str, Any], device: str) -> Decoder:
    """Return a model of the recipe's shape with random weights, which take the same time."""
    decoder = Decoder(section_config(section))
    decoder.initialize(0)
    return decoder.to("cuda") if device == "cuda" else decoder


def _publish_seconds(decoder: Decoder, clock: Callable[[], float]) -> float:
    engine = Engine(decoder, slots=1)
    engine.update_weights(None, 1)
    began = clock()
    engine.update_weights(None, 2)
    return clock() - began


def _measure_training(recipe: Recipe, shapes: Sequence[Shape]) -> dict[str, Any]:
    """Return the times of training, from RL stages of several shapes on small sums."""
    assert recipe.model is not None
    section = recipe.model.model_dump(mode="json", exclude_none=True)
    resources = recipe.resources.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    stages = "".join(
        shape.stage(number, STEPS if number else MIN_LONG_RUN_STEPS) for number, shape in enumerate(shapes)
    )
    text = RECIPE.format(model=json.dumps(section), resources=json.dumps(resources), stages=stages)
    with run_on_sums(text) as document:
        folders = [Path(bundle) / "artifacts" for bundle in document["bundles"].values()]
        fitted = fit_training(folders, [stage["seconds"] for stage in document["stages"]])
    tokenizer = recipe_tokenizer(recipe.model.model_dump())
    once, thrice = (
        try_environment({"id": sums, "source": ENVIRONMENT}, 0, tokenizer, None, actions).episode
        for sums, actions in ((SUMS, ("0",)), (TURNS, ("0",) * 3))
    )
    answer = max(0.0, thrice - once) / 2
    return fitted | {"trial": (answer, max(0.0, once - answer))}
