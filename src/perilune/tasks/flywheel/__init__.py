"""flywheel: rounds of sampling, filtering and training."""
