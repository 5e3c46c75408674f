"""Cassettes: recorded episodes that are replayed as regression tests of the harness around a model."""
