"""A gallery of architectures: what their configurations alone say about size, cost and support."""
