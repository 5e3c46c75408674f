"""Connect Four: thousands of games at once, an exact solver, and a small network that learns by self-play.

A library beside the language models: it shares their kernels' build, optimizer and statistics, and nothing of
theirs depends on it.
"""
