"""What `perilune run --detach` leaves behind where there is no daemon: it goes on with one experiment.

It may be killed at any moment: a daemon, or the next command, goes on.
"""

from __future__ import annotations

import sys

from perilune.cli.failures import explain
from perilune.cli.run import follow_to_the_end
from perilune.control.queries.lookup import find_experiment
from perilune.control.runs.experiments import Control
from perilune.control.runs.next_stage import recorded_recipe, template_of


def main(experiment_id: str) -> int:
    """Carry the experiment to its end, as long as it is wanted; returns the exit code."""
    control = Control()
    experiment = find_experiment(control, experiment_id)
    recipe = recorded_recipe(control, experiment_id)
    template, again = template_of(experiment), f"perilune run {recipe.name}"
    try:
        follow_to_the_end(control, experiment_id, recipe, template, again, asked=False)
    except BaseException as error:
        return explain(error, debug=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
