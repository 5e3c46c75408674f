"""A wiki compiled from the runs of a home. Its numbers are queries over signed results."""
