"""Comparison of rollouts on a CPU: our engine and its peers, each in its own process and environment."""
