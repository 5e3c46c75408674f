"""Environments whose policy explores with Python in a sandbox, and calls functions of the environment."""
