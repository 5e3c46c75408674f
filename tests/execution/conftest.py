"""Fixtures shared with the control plane tests, from tests/drill."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "drill"))

from drill_fixtures import *  # noqa: F403
