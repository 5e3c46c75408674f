"""Checkpoint folders: loading, saving and checksums."""
