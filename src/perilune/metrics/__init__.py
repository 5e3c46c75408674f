"""What a run achieved, with error bars: pass@k, intervals over problems, what an estimator optimises."""
