"""Metrics of runs with confidence intervals: pass@k, differences between runs, growth, overoptimisation."""
