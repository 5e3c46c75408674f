"""Rollouts: sample answers to tasks, score them, and keep every token."""
