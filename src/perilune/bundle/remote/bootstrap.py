"""Make the Python environment of this bundle from the locked requirements and the wheel beside this file.

Standard library only. Prints the folder of the finished virtual environment; pip's output goes to stderr.
The environment is kept under PERILUNE_HOME (default ~/.perilune) and reused by every bundle with the same
lock, wheel and Python.

Build labels ("+cpu", "+cu126") are part of a locked version. If this machine needs another build of the same
version (for example for a GPU), set PERILUNE_ANY_BUILD=1 to ignore the labels. pip's own settings
(PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX) apply, and also apply to uv with
PERILUNE_INSTALLER=uv.

With PERILUNE_INSTALLED=1 no environment is made: this Python must already have exactly the locked packages
and the files of the wheel, or the bundle does not run.
"""

import fcntl
import os
import re
import sys
import zlib
from importlib import metadata, util
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - the user may choose any Python
        return fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: set PYTHON", 2)
    lines = (SCRIPTS / "requirements.lock").read_text(encoding="utf-8").splitlines()
    requirements = [line.partition("#")[0].strip() for line in lines]  # a comment has a digest, for readers
    if os.environ.get("PERILUNE_ANY_BUILD"):
        requirements = [re.sub(r"\+.*", "", line) for line in requirements]
    (wheel,) = SCRIPTS.glob("perilune-*.whl")

    if os.environ.get("PERILUNE_INSTALLED"):
        problems = [line for line in requirements if installed(line.partition("==")[0]) != unlabelled(line)]
        problems += differing_files(wheel)
        if problems:
            more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
            return fail(f"{sys.executable} lacks packages that the bundle needs: {problems[0]}{more}", 2)
        print(Path(os.environ.get("PYTHON") or sys.executable).absolute().parent.parent)
        return 0

    import hashlib  # here and below: modules that are needed only to make an environment
    import platform

    package = hashlib.sha256(wheel.read_bytes()).hexdigest()
    identity = [platform.python_version(), sys.prefix, *requirements, package]
    name = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    environment = home() / "environments" / name
    environment.parent.mkdir(parents=True, exist_ok=True)
    with environment.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two bundles may start at once
        if not (environment / "complete").exists():
            code = install(environment, [*requirements, str(wheel)])
            if code:
                return code
        (environment / "complete").touch()  # its time also records the last use
    print(environment)
    return 0


def home() -> Path:
    return Path(os.environ.get("PERILUNE_HOME") or Path.home() / ".perilune").resolve()


def installed(name: str) -> str:
    """Return the lock line of the installed package `name`; "" if it is not installed."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return ""
    match = re.search(r"^Version: *(\S+)", distribution.read_text("METADATA") or "", re.MULTILINE)
    version = match[1] if match else distribution.version  # `version` parses all metadata, slowly
    return unlabelled(f"{name}=={version}")


def unlabelled(line: str) -> str:
    return re.sub(r"\+.*", "", line) if os.environ.get("PERILUNE_ANY_BUILD") else line


def differing_files(wheel: Path) -> list[str]:
    """Return the files of the installed Perilune that differ from the wheel."""
    spec = util.find_spec("perilune")
    if spec is None or spec.origin is None:
        return [wheel.name]
    import zipfile

    root = Path(spec.origin).parent.parent
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.startswith("perilune/")]
    files = [(root / member.filename, member.CRC) for member in members]
    return [str(file) for file, crc in files if not file.is_file() or zlib.crc32(file.read_bytes()) != crc]


def install(environment: Path, wanted: list[str]) -> int:
    import subprocess
    import venv

    print(f"making {environment}", file=sys.stderr)
    with_uv = os.environ.get("PERILUNE_INSTALLER") == "uv"
    if not with_uv and util.find_spec("ensurepip") is None:  # Debian has it in a separate package
        return fail(f"{sys.executable} cannot make environments: install python3-venv, or uv", 2)
    venv.create(environment, clear=True, with_pip=not with_uv)
    python = str(environment / "bin" / "python")
    installer = ["uv", "pip", "install", "--python", python, *settings_for_uv()]
    if not with_uv:
        installer = [python, "-m", "pip", "--disable-pip-version-check", "install"]
    try:
        code = subprocess.run([*installer, *wanted], stdout=sys.stderr, check=False).returncode
    except FileNotFoundError:
        return fail("uv is not on PATH", 2)
    if code == 0:
        return 0
    labelled = [line for line in wanted if "==" in line and "+" in line]
    hint = f"; {', '.join(labelled)} may need PIP_EXTRA_INDEX_URL or PERILUNE_ANY_BUILD=1" if labelled else ""
    return fail(f"{'uv' if with_uv else 'pip'} could not install the locked requirements{hint}")


def settings_for_uv() -> list[str]:
    """Return pip's settings as options of uv."""
    options = [] if not os.environ.get("PIP_NO_INDEX") else ["--no-index"]
    for name in ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL"):
        for value in os.environ.get(f"PIP_{name}", "").split():
            options += ["--" + name.lower().replace("_", "-"), value]
    return options


def fail(message: str, code: int = 1) -> int:
    """Print the message and return the exit code: 1 if a retry may help, 2 if not."""
    print(f"bootstrap: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
