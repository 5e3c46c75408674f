"""Rollouts on a CPU: our engine against its peers, each in its own process and its own environment."""
