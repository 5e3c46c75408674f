"""Connect Four: thousands of games at once, an exact solver, and a small network that learns by self-play.

It shares the kernel build, the optimizer and the statistics with the language models. They do not depend on
it.
"""
