"""When CI is set, only tests marked gpu may skip."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_skips():
    pytest.skip("no Chromium: apt install chromium")

@pytest.mark.gpu
def test_needs_a_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail(reason="known")
def test_known():
    assert False
"""
MODULE = "import pytest\n\npytest.importorskip('no_such_package')\n"


def run_pytest(folder: Path, text: str, ci: str) -> tuple[int, str]:
    """Run pytest on one file with this project's conftest; returns exit code and output."""
    for name in ("conftest.py", "processor_time.py"):
        shutil.copy(Path(__file__).parents[1] / name, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    (folder / "test_some.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_some.py"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_"))}
    environment |= {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout


@pytest.mark.parametrize("ci", ["", "false"])
def test_skips_pass_outside_continuous_integration(tmp_path: Path, ci: str) -> None:
    code, text = run_pytest(tmp_path, TESTS, ci)
    assert code == 0 and "2 skipped, 1 xfailed" in text


def test_skips_fail_in_continuous_integration(tmp_path: Path) -> None:
    code, text = run_pytest(tmp_path, TESTS, "true")
    assert code == 1 and "1 failed, 1 skipped, 1 xfailed" in text
    assert "this one did: Skipped: no Chromium: apt install chromium" in text


def test_module_skips_fail_in_continuous_integration(tmp_path: Path) -> None:
    code, text = run_pytest(tmp_path, MODULE, "true")
    assert code != 0 and "only GPU tests may skip" in text and "no_such_package" in text
