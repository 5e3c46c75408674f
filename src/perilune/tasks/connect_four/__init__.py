"""Connect Four stages: train a player, and evaluate it."""
