"""Where attempts run. `protocol` says what a place has to offer; every other module is one kind of place."""

from perilune.execution.placements.protocol import Assignment, Capabilities, Placement

__all__ = ["Assignment", "Capabilities", "Placement"]
