"""pass@k, intervals, and what an estimator implicitly optimises."""
