"""The process that `perilune run --detach` leaves behind if no daemon runs: it runs one experiment.

It may be killed at any moment. A daemon or the next command then continues the experiment.
"""

import sys

from perilune.cli.failures import report_failure
from perilune.cli.train.run import run_experiment
from perilune.control.queries.lookup import find_experiment
from perilune.control.runs.experiments import Control
from perilune.control.runs.next_stage import read_recipe, submission_template


def main(experiment_id: str) -> int:
    """Run the experiment to its end, or until a user cancels it; returns the exit code."""
    control = Control()
    experiment = find_experiment(control, experiment_id)
    recipe = read_recipe(control, experiment_id)
    template, command = submission_template(experiment), f"perilune run {recipe.name}"
    try:
        run_experiment(control, experiment_id, recipe, template, command, asked=False)
    except BaseException as error:
        return report_failure(error, debug=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
