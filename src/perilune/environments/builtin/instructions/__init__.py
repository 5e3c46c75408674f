"""Requests with constraints that code checks, such as length, words, layout, case and language."""

from perilune.environments.builtin.instructions.environment import InstructionsEnvironment

__all__ = ["InstructionsEnvironment"]
