"""A sandbox for code that a model wrote: Python behind walls that are tested on each machine."""

from perilune.sandbox.limits import SandboxLimits
from perilune.sandbox.mechanisms import WALLS
from perilune.sandbox.sandbox import Capabilities, Execution, Sandbox, SandboxFailedError

__all__ = ["WALLS", "Capabilities", "Execution", "Sandbox", "SandboxFailedError", "SandboxLimits"]
