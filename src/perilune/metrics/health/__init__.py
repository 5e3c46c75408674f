"""The health of a training run, from the lines that it writes: healthy, watch or broken, and why."""
