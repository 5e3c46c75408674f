"""Environments that come with Perilune."""
