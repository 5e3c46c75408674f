"""Stages that train on data: sft, preference, reward_model."""
