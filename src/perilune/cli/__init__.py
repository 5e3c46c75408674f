"""Thin: parse, call, print."""
