"""Stages that make training data: collect, rejection_sampling, pairs."""
