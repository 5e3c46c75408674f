"""Runs a bundle somewhere and brings the evidence home. Knows files and processes, never what a task is."""
