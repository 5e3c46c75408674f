"""Task plugins: shape a bundle, run inside it, summarise it."""
