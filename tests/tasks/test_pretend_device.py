"""Engine, learner and tasks on a simulated device, where mixing its tensors with CPU tensors is an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

pytestmark = pytest.mark.slow

new_backends = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="needs a PyTorch that takes backends written in Python",
)


@new_backends
def test_gpu_code_runs_on_the_pretend_device() -> None:
    cases = Path(__file__).parent / "pretend_device_cases.py"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_"))}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr
