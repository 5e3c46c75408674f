"""Connect Four stages: train a player, and judge it."""
