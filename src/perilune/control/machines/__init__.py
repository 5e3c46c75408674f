"""Rented machines: providers, budgets, and the lifecycle of each machine."""
