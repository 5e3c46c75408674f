"""A home on a disk that fills up: one clear error, no data loss, and work continues after space is freed."""

import subprocess
import sys
from pathlib import Path

import pytest

from perilune.bundle.wheel import build_wheel

pytestmark = pytest.mark.slow

ISOLATED = ["unshare", "--user", "--map-root-user", "--mount"]

# Runs the command on a small disk, adds space, and runs the command again.
SCENARIO = """
set -e
mount -t tmpfs -o size=$1 none "$2"
"$3" -c "$4" "$2/home"
mount -o remount,size=64m "$2"
"$3" -c "$4" "$2/home"
"""

COMMAND = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "drill")!r})
from pathlib import Path
from drill_cases import carry_out, drill_control, drill_plan
from perilune.errors import RequestError
try:
    last = carry_out(drill_control(Path(sys.argv[1])), drill_plan(steps=2))[-1]
    print(type(last).__name__, getattr(last, "cause", ""))
except RequestError as error:
    print("RequestError", error.remedy)
"""


@pytest.mark.parametrize(  # disk size in bundles: a run takes a little more than two
    "bundles", [0.9, *(pytest.param(room, marks=pytest.mark.thorough) for room in (0.05, 1.7, 2.05))]
)
def test_run_survives_full_disk_with_clear_error(tmp_path: Path, bundles: float) -> None:
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs unshare(1) with user namespaces: sysctl kernel.unprivileged_userns_clone=1")
    size = int(bundles * len(build_wheel()[1]))
    arguments = ["sh", str(size), str(tmp_path), sys.executable, COMMAND]
    done = subprocess.run(
        [*ISOLATED, "sh", "-c", SCENARIO, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    full, freed = done.stdout.splitlines()
    assert full.startswith("RequestError free some space") or full == "StageFailed disk_full"
    assert freed == "StageFinished "


REMEDY = """
set -e
mount -t tmpfs -o size=80m none "$1"
"$2" -c "import sys; sys.path[:0] = sys.argv[2:]
from pathlib import Path
from drill_cases import drill_control
drill_control(Path(sys.argv[1]))" "$1/home" "$3"
mkdir -p "$1/home/environments/unused"
head -c 1m /dev/zero > "$1/home/environments/unused/big"
touch -d "60 days ago" "$1/home/environments/unused"
cat /dev/zero > "$1/fill" 2>/dev/null || true
export PERILUNE_HOME="$1/home"
"$2" -m perilune.cli.main runs || echo "refused"
"$2" -m perilune.cli.main gc --yes
"$2" -m perilune.cli.main runs
"""


def test_gc_frees_space_on_full_disk(tmp_path: Path) -> None:
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs unshare(1) with user namespaces: sysctl kernel.unprivileged_userns_clone=1")
    arguments = ["sh", str(tmp_path), sys.executable, str(Path(__file__).parents[1] / "drill")]
    done = subprocess.run(
        [*ISOLATED, "sh", "-c", REMEDY, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "refused" in done.stdout:  # nothing can be written, and the error names the remedy
        assert "perilune gc --yes" in done.stderr
    assert "deleted 1.0 MiB" in done.stdout and "no runs yet" in done.stdout
