"""Requests with constraints that code checks, such as length, words, layout, case and language."""
