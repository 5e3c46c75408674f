"""Queries about runs: lookup, explanation and forecast. They change nothing."""
