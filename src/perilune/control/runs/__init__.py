"""Experiments and runs: submission, reconciling, retries, and the end of each attempt."""
