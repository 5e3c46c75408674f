"""Rented machines: providers, leases, budgets, and the life cycle of each machine."""
