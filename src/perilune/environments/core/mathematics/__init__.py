"""Equality of mathematical answers in LaTeX or plain text."""

from perilune.environments.core.mathematics.equality import is_equal

__all__ = ["is_equal"]
