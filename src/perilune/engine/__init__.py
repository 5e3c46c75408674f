"""The engine: batched sampling with a paged KV cache and exact log-probs."""
