"""Make the environment of this bundle: the locked requirements and the wheel beside this file.

Standard library only. Prints the folder of a virtual environment that is ready; pip speaks on stderr.
The environment is kept under PERILUNE_HOME (default ~/.perilune) and used again by every bundle with the
same lock, wheel and Python.

Build labels ("+cpu", "+cu126") are part of a locked version. Where this machine needs another build of the
same version (a GPU instead of the CPU that froze the bundle), set PERILUNE_ANY_BUILD=1 to ignore the labels.
pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) are honoured.
"""

import fcntl
import hashlib
import os
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - any Python may be told to run this
        return fail(f"Python 3.11 or newer is needed, this is {platform.python_version()}: set PYTHON")
    requirements = (SCRIPTS / "requirements.lock").read_text(encoding="utf-8").split()
    if os.environ.get("PERILUNE_ANY_BUILD"):
        requirements = [re.sub(r"\+.*", "", line) for line in requirements]
    (wheel,) = SCRIPTS.glob("perilune-*.whl")

    package = hashlib.sha256(wheel.read_bytes()).hexdigest()
    identity = [platform.python_version(), sys.prefix, *requirements, package]
    name = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    environment = home() / "environments" / name
    environment.parent.mkdir(parents=True, exist_ok=True)
    with environment.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two bundles may start here at once
        if not (environment / "complete").exists():
            code = install(environment, [*requirements, str(wheel)])
            if code:
                return code
            (environment / "complete").touch()
    print(environment)
    return 0


def home() -> Path:
    return Path(os.environ.get("PERILUNE_HOME") or Path.home() / ".perilune").resolve()


def install(environment: Path, wanted: list[str]) -> int:
    print(f"making {environment}", file=sys.stderr)
    venv.create(environment, clear=True, with_pip=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    code = subprocess.run([*pip, *wanted], stdout=sys.stderr, check=False).returncode
    if code == 0:
        return 0
    labelled = [line for line in wanted if "==" in line and "+" in line]
    hint = f"; {', '.join(labelled)} may need PIP_EXTRA_INDEX_URL or PERILUNE_ANY_BUILD=1" if labelled else ""
    return fail(f"pip could not install the locked requirements{hint}")


def fail(message: str) -> int:
    print(f"bootstrap: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
