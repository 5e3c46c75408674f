"""Values of K keys in K shards, read by one agent or by sub-agents that it spawns and joins."""
