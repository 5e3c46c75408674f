"""Rollouts: batched sampling with a KV cache and exact log-probs."""
