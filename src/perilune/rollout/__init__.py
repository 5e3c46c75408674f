"""Rollouts: play tasks with an engine, score what it answers, and keep every token."""
