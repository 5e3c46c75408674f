"""Both planes share the fixtures in tests/drill; stages to run are in tests/tasks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "drill"))

from cloud_fixtures import *  # noqa: F403
from drill_fixtures import *  # noqa: F403
