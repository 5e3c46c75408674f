"""Which placement a run's attempts have: that of the template recorded with it, else this machine."""

from __future__ import annotations

from pathlib import Path

from perilune.control.home import Home
from perilune.control.planner import RetryPolicy
from perilune.execution.placements.local import LocalPlacement
from perilune.execution.placements.protocol import Placement


class Placements:
    """The placements of a home's runs. One object a place, so that connections are shared.

    Args:
        policy: for runs that were submitted without a template.
    """

    def __init__(self, home: Home, policy: RetryPolicy) -> None:
        self.home, self.policy = home, policy
        self.local = LocalPlacement()

    def of(self, run_id: str) -> Placement:
        """Where the attempts of a run are."""
        return self.local

    def policy_of(self, run_id: str) -> RetryPolicy:
        """How often, and when, another attempt of a run follows one that has ended."""
        return self.policy

    def template_path(self, run_id: str) -> Path:
        """Where the template lies that a run was submitted with."""
        return self.home.run(run_id) / "template.json"
