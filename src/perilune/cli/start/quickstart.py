"""`perilune quickstart`: run the bundled recipe quickstart."""

from perilune.cli.arguments import Json, SetOption
from perilune.cli.train.run import SeedOption, overrides, run_recipe


def quickstart(set_: SetOption = None, seed: SeedOption = None, as_json: Json = False) -> None:
    """Generate data, fine-tune a tiny model, train it with RL and evaluate it, in minutes on this machine.

    Runs the bundled recipe quickstart. Nothing is downloaded.

    \b
    perilune quickstart
    perilune quickstart --seed 1 --set rl.steps=20
    """
    run_recipe("quickstart", overrides(set_, seed), "perilune quickstart", as_json=as_json)
