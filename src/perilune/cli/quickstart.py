"""`perilune quickstart`: the bundled recipe, from nothing to a proven climb."""

from __future__ import annotations

from perilune.cli.run import JsonOption, SeedOption, SetOption, overrides, run_recipe


def quickstart(set_: SetOption = None, seed: SeedOption = None, as_json: JsonOption = False) -> None:
    """Make data, give a tiny model a cold start, let it climb, and prove it, in minutes on this machine.

    Nothing is downloaded. The recipe is the bundled one called quickstart.

    \b
    perilune quickstart
    perilune quickstart --seed 1 --set rl.steps=20
    """
    run_recipe("quickstart", overrides(set_, seed), "perilune quickstart", as_json=as_json)
