"""A package for verifiers v0, which Perilune rejects."""


def load_environment():
    raise AssertionError("load_environment was called")
