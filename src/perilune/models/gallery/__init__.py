"""A gallery of architectures: their size, cost and support, computed from configurations alone."""
