"""Placements: where attempts run. `protocol` defines the interface that the others implement."""

from perilune.execution.placements.protocol import Assignment, Capabilities, Placement

__all__ = ["Assignment", "Capabilities", "Placement"]
