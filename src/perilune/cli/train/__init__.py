"""Commands that run recipes and control their runs."""

COMMANDS = {
    "run": ("train.run:run", "Run a recipe, or resume one that was run before."),
    "sweep": ("train.sweep:sweep", "Run a recipe with several settings and seeds, and compare them."),
    "simulate": ("train.simulate:simulate", "Predict the RL stages of a recipe before they run."),
    "simulate-serving": (
        "train.simulate_serving:simulate_serving",
        "Predict how a fleet serves a trace of requests.",
    ),
    "eval": ("train.evaluate:evaluate", "Evaluate a checkpoint on an environment."),
    "probe": ("train.probe:probe", "Find the environments that a checkpoint can learn from."),
    "wait": ("train.lifecycle:wait", "Wait until a run or an experiment ends."),
    "cancel": ("train.lifecycle:cancel", "Stop a run or an experiment."),
    "retry": ("train.lifecycle:retry", "Retry a failed run from its last complete checkpoint."),
    "reproduce": ("train.lifecycle:reproduce", "Rerun a frozen bundle and compare the results."),
}
