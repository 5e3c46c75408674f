"""Environments whose policy explores with Python in a sandbox, and calls functions of the environment."""

from perilune.environments.interpreter.recursive import RecursiveEnvironment

__all__ = ["RecursiveEnvironment"]
