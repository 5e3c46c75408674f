"""Perilune: post-training from one recipe, on the machine you have."""

__version__ = "0.1.0"
