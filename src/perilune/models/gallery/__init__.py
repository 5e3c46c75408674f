"""A gallery of models: their architecture, size, cost and support, computed from configurations alone."""
