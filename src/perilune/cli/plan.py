"""What a recipe will do, derived before any work starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from perilune.bundle.plugin import load_plugin
from perilune.errors import RequestError
from perilune.recipe.schema import job_for
from perilune.terminal import printable

if TYPE_CHECKING:
    from perilune.control.templates import Template
    from perilune.recipe.schema import Recipe


def derive(recipe: Recipe, template: Template | None = None) -> list[dict[str, Any]]:
    """What each stage's plugin derives from its job where it is to run, in the order in which stages run.

    Raises:
        RequestError: when a stage cannot work, naming the stage.
    """
    stages = []
    for stage in recipe.stages:
        try:
            job = job_for(recipe, stage)
            job = job if template is None else template.job(job)
            figures = dict(load_plugin(stage.task).plan(job))
        except RequestError as error:
            where = f"stages.{stage.name}" + (f": {error.where}" if error.where else "")
            raise RequestError(error.what, where=where, remedy=error.remedy) from None
        if job.resources.processes > 1:
            figures["processes"] = f"{job.resources.processes}, each of which takes that memory"
        stages.append(
            {"name": stage.name, "task": stage.task, "consumes": stage.consumes, "derived": figures}
        )
    return stages


def print_plan(recipe: Recipe, stages: Sequence[dict[str, Any]], out: TextIO) -> None:
    """Print what was derived, a block a stage."""
    lines = [f"{recipe.name}, seed {recipe.seed}"]
    if recipe.model is not None:
        environment = "/".join(
            str(recipe.environment[key]) for key in ("id", "task") if key in recipe.environment
        )
        lines = [f"{lines[0]}: model {recipe.model.preset or recipe.model.path}, environment {environment}"]
    labels = [name for stage in stages for name in stage["derived"]]
    width = max((len(label) for label in labels), default=0)
    for stage in stages:
        taken = ", ".join(f"{field} from {source}" for field, source in stage["consumes"].items())
        lines.append(f"  {stage['name']}: {stage['task']}" + (f" ({taken})" if taken else ""))
        lines += [f"      {name:<{width}}  {value}" for name, value in stage["derived"].items()]
    out.write(printable("\n".join(lines)) + "\n")
    out.flush()
