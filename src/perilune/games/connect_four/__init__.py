"""Connect Four: thousands of games at once, an exact solver, and a small network that learns by self-play.

It uses the kernel build, the optimizer and the statistics of the language models.
"""
