"""selfplay: reinforcement learning in games against earlier versions of the policy."""
