"""Run a recipe or evaluate a checkpoint from Python, as `perilune run` and `perilune eval` do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.bundle.plugin import load_plugin
from perilune.control.runs.experiments import Control, advance, open_experiment, plan_stages
from perilune.control.runs.progress import (
    StageEvent,
    StageFailed,
    StageFinished,
    StageReused,
    explain_failure,
)
from perilune.recipe.evaluation import EVALUATION_STAGE, make_evaluation_recipe
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class StageResult:
    """A stage that succeeded.

    Attributes:
        run_id: the run that did the work, for `perilune show`.
        summary: the content of its artifacts/summary.json.
        output: what later stages consume: the folder of a checkpoint, a file of traces, an evaluation.
    """

    run_id: str
    summary: Mapping[str, Any]
    output: Path


def run(
    recipe: Recipe | str | Path, *, on_event: Callable[[StageEvent], None] | None = None
) -> dict[str, StageResult]:
    """Run all stages of a recipe on this machine and return their results by stage name.

    Finished stages are reused, and stages that are under way are joined. State lives in $PERILUNE_HOME
    (default ~/.perilune), where the command line finds the same experiment. If the calling process is
    interrupted, the current stage continues; `perilune cancel` stops it. `perilune report` writes the
    experiment's report, and `perilune track` copies its figures to trackers.

    Args:
        recipe: a loaded recipe, the path of a YAML file, or the name of a bundled recipe.
        on_event: called with the start, the progress and the end of each stage.

    Raises:
        RequestError: the recipe is invalid, or a stage rejects it.
        WorkFailedError: a stage fails or is cancelled.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    control = Control()
    plans = plan_stages(loaded)
    outputs = {plan.name: load_plugin(plan.job.task).output for plan in plans}
    results: dict[str, StageResult] = {}
    for event in advance(control, open_experiment(control, loaded), plans):
        if on_event is not None:
            on_event(event)
        if isinstance(event, StageFailed):
            raise explain_failure(event)
        if isinstance(event, StageFinished | StageReused):
            directory = control.directory(control.run(event.run_id))
            results[event.stage] = StageResult(event.run_id, event.summary, directory / outputs[event.stage])
    return results


def evaluate(
    checkpoint: str | Path,
    environment: Mapping[str, Any],
    *,
    tasks: int = 128,
    samples: int = 8,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    seed: int = 0,
) -> Mapping[str, Any]:
    """Evaluate a checkpoint on the held-out tasks of an environment, with confidence intervals.

    The evaluation is a run like any other, and a finished evaluation with the same arguments is reused.

    Args:
        checkpoint: Hugging Face folder, such as the `output` of a stage that `run` returns, or the id of a
            model in the local cache.
        environment: the section of a recipe: {"id": ..., ...}.
        tasks: number of held-out tasks. The same seed gives the same tasks.
        samples: samples per task, for pass@k up to this k. Each task also gets one greedy answer.
        max_tokens: longest answer in tokens. Default: 64, or 256 for a pretrained model.
        temperature: of sampling.
        seed: of the tasks and of the samples.

    Returns:
        The summary of the run: "pass@1" and further pass@k with their intervals, "greedy", "length",
        "truncated" and the other figures of an evaluation.

    Raises:
        RequestError: the checkpoint, the environment or a number is invalid.
        WorkFailedError: the evaluation fails.
    """
    fields = {"tasks": tasks, "samples": samples, "max_tokens": max_tokens, "temperature": temperature}
    return run(make_evaluation_recipe(Path(checkpoint), environment, fields, seed))[EVALUATION_STAGE].summary
