"""Advantages, losses and the trainer."""
