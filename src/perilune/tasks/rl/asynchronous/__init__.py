"""Asynchronous reinforcement learning: rollout processes sample while the learner trains."""
