"""Adapters to other environment packages."""
