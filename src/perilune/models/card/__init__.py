"""The size of a model: its parameters, cache and compute, read from its config.json."""
