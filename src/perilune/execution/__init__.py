"""Runs a bundle somewhere and brings the evidence home; never learns what a task is."""
