"""Weight synchronisation: what a learner sends to those that sample, and how it arrives."""

from __future__ import annotations

from typing import Literal

Sent = Literal["auto", "full", "delta"]
"""What is sent: whole tensors (full), or the values that changed where these are smaller. With "auto" changes
are only searched in tensors of fewer than four bytes per value."""
