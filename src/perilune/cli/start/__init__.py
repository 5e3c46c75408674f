"""Commands to begin with."""

COMMANDS = {
    "quickstart": ("start.quickstart:quickstart", "Train a tiny model end to end, in minutes."),
    "new": ("start.new:new", "Write a commented recipe to start from."),
    "doctor": ("start.doctor:doctor", "Check this machine and say how to fix what is missing."),
    "calibrate": ("start.calibrate:calibrate", "Measure a model on this machine, for `perilune simulate`."),
}
