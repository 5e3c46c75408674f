"""`perilune calibrate`: measure a recipe's model on this machine, for `perilune simulate`."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from perilune.cli.arguments import Json, RecipeArgument, SetOption
from perilune.cli.output import echo, print_json
from perilune.control.record.home import Home

if TYPE_CHECKING:
    from perilune.simulate.times import Calibrated

ENGINE_SECONDS = 10.0  # seconds to measure the engine


def calibrate(
    recipe: RecipeArgument,
    set_: SetOption = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds to measure the engine.")] = ENGINE_SECONDS,
    as_json: Json = False,
) -> None:
    """Measure the engine and the learner with a recipe's model, for `perilune simulate`.

    A small model takes about a minute. Run this on an idle machine. The results are stored in
    $PERILUNE_HOME, for this machine, model and version of the engine.

    \b
    perilune calibrate quickstart
    perilune calibrate my.yaml --json
    """
    from rich.console import Console

    from perilune.plan.simulation_calibration import measure_times
    from perilune.recipe.load import load_recipe
    from perilune.simulate.times import save_coefficients

    loaded = load_recipe(recipe, set_ or ())
    with Console(stderr=True).status("Calibrating") as status:
        calibrated = measure_times(loaded, seconds, status.update)
    save_coefficients(Home.open().root, calibrated)
    if as_json:
        print_json(asdict(calibrated))
        return
    for line in describe(calibrated):
        echo(line)
    echo(f"To predict a run: perilune simulate {shlex.quote(recipe)}")


def describe(found: Calibrated) -> list[str]:
    """Describe the coefficients in lines of text."""
    times = found.times
    constant, token, episode, pair = times.update
    batch, reply, played = times.scoring
    fixed, each, step, whole = times.recording
    return [
        f"calibrated on {found.machine}; mean error per engine step {found.error:.0%}",
        f"  an update     {constant:.4g} s, {1e6 * token:.3g} us a token,"
        f" {1e6 * pair:.3g} us a key that it attends to, {1e6 * episode:.3g} us an episode",
        f"  scoring       {batch:.4g} s, {1e6 * reply:.3g} us an answer, {1e6 * played:.3g} us an episode",
        f"  recording     {fixed:.4g} s, {1e6 * each:.3g} us a token, {1e6 * step:.3g} us an answer,"
        f" {1e6 * whole:.3g} us an episode",
        f"  new weights   {times.publish:.4g} s",
        f"  stage start   {times.start:.3g} s, and {times.checks:.3g} s of checks before a long run",
    ]
