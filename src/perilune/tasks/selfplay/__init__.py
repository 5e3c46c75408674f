"""selfplay: reinforcement learning in games against frozen past policies."""
