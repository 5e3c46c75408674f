"""Task plugins: shape a bundle, run inside it, summarise it.

Each module registers one plugin. Its imports stay light, so that a recipe validates in milliseconds; torch
and the rest of the library are imported when the task runs.
"""
