"""Weight synchronisation: from a learner to rollout processes, and from a checkpoint to a server."""

from typing import Literal

Sent = Literal["auto", "full", "delta"]
"""How tensors are sent: whole (full), or as the values that changed where these are smaller (delta). "auto"
searches for changes only in tensors of fewer than four bytes per value."""
