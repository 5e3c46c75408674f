"""Upper bounds of counts in a stage. A larger number is a mistake that would otherwise fail at run time."""

MAX_TASKS = 1_000_000  # tasks, games or rows of a step or of an evaluation
MAX_SAMPLES = 4096  # answers per task
