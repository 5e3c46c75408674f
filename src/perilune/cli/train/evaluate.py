"""`perilune eval`: evaluate any checkpoint on the held-out tasks of an environment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import (
    AnswerTokens,
    CheckpointArgument,
    EnvironmentFields,
    EvaluationSeed,
    Json,
    find_checkpoint,
)
from perilune.cli.data.environments import environment_section
from perilune.cli.output import say_if_slow
from perilune.cli.train.plan import derive_plans, print_plan
from perilune.cli.train.run import SLOW_CHECK, run_stages
from perilune.recipe.evaluation import make_evaluation_recipe

if TYPE_CHECKING:
    from perilune.control.queries.lookup import StageStatus


def evaluate(
    checkpoint: CheckpointArgument,
    *,
    environment: Annotated[
        str,
        typer.Option(
            "--environment",
            "-e",
            metavar="ID",
            help="Id of an environment, with its family: reasoning_gym/chain_sum.",
        ),
    ],
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
    tasks: Annotated[int, typer.Option(min=1, help="Number of held-out tasks.")] = 128,
    samples: Annotated[int, typer.Option(min=1, help="Samples for each task.")] = 8,
    max_tokens: AnswerTokens = None,
    seed: EvaluationSeed = 0,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on the held-out tasks of an environment, with confidence intervals.

    The evaluation is a run like any other: `perilune runs` lists it, and it has a bundle. If you run the
    same command again, it prints the recorded result. The environment has its own default settings, not
    those of the recipe that trained the checkpoint. Change them with --set.

    \b
    perilune eval quickstart/rl --environment reasoning_gym/basic_arithmetic --set prompt=compact
    perilune eval ./my-model --environment calculator --tasks 64 --samples 4 --json
    """
    from perilune.control.runs.experiments import Control

    fields = {"tasks": tasks, "samples": samples, "max_tokens": max_tokens}
    section = environment_section(environment, settings)
    with say_if_slow(SLOW_CHECK):
        recipe = make_evaluation_recipe(find_checkpoint(checkpoint), section, fields, seed, called=checkpoint)
        plans = derive_plans(recipe)
    print_plan(recipe, plans, sys.stderr)
    options = [part for setting in settings for part in ("--set", setting)]
    options += [
        part
        for name, value in fields.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    again = shlex.join(["perilune", "eval", checkpoint, "--environment", environment, *options])
    run_stages(Control(), recipe, None, again, as_json=as_json)


def run_evaluation(
    folder: Path, section: Mapping[str, Any], fields: Mapping[str, Any], seed: int, called: str
) -> StageStatus:
    """Run an evaluation, or reuse a finished one, without printing its results.

    Raises:
        PeriluneError: when the environment is wrong, or the evaluation fails.
    """
    from perilune.cli.train.follow import follow
    from perilune.control.queries.lookup import stage_statuses
    from perilune.control.runs.experiments import Control, open_experiment

    with say_if_slow(SLOW_CHECK):
        recipe = make_evaluation_recipe(folder, section, fields, seed, called=called)
        derive_plans(recipe)  # refuses what does not fit the machine
    control = Control()
    experiment = open_experiment(control, recipe)
    if (failure := follow(control, experiment, recipe)) is not None:
        raise failure
    (status,) = stage_statuses(control, [experiment])
    return status
