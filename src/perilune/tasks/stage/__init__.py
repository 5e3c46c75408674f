"""Shared parts of the stages: policy loading, engine set-up, the training loop, checkpoints, weights."""
