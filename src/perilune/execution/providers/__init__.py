"""Providers, which rent out machines: the interface and its implementations."""
