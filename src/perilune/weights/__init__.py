"""Weight synchronization: from a learner to rollout processes, and from a checkpoint to a server."""

from typing import Literal

SendMode = Literal["auto", "full", "delta"]
"""Form in which tensors are sent: whole (full), or as changed values where these are smaller (delta).
"auto" searches for changes only in tensors of fewer than four bytes per value."""
