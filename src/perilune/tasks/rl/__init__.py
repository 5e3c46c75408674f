"""rl: reinforcement learning against the verifier."""
