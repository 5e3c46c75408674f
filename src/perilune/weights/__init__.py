"""Weight synchronisation: what a learner sends to those that sample, and how it arrives."""

from __future__ import annotations

from typing import Literal

Sent = Literal["auto", "full", "delta"]
"""What is sent: whole tensors, the values that changed, or for each tensor the smaller one."""
