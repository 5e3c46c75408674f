"""Upper bounds of counts in a stage. A larger number is a mistake, which would fail only while it runs."""

MAX_TASKS = 1_000_000  # tasks, games or rows of a step or of an evaluation
MAX_SAMPLES = 4096  # answers per task
