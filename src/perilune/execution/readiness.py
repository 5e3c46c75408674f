"""Check which required and optional things a machine lacks, and name the command that installs each.

Packages are not imported, so that a broken package cannot break the check.
"""

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from perilune.bundle.machine import Machine

Status = Literal["ok", "advice", "missing"]

_GIB = 2**30
_MEMORY_NEEDED, _MEMORY_ADVISED = 1 * _GIB, 4 * _GIB  # the quickstart needs less than _MEMORY_NEEDED
_DISK_NEEDED, _DISK_ADVISED = _GIB // 4, 2 * _GIB
# On these, processes on different machines share no memory, which SQLite's write-ahead log needs.
_NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smbfs", "smb3", "9p", "afs", "fuse.sshfs"})
_CLIENT_TIMEOUT_S = 10.0
MAX_NAMED_PACKAGES = 4  # packages of an extra that a finding names


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the check.

    Attributes:
        status: "ok"; "advice" if something optional is missing or slow; "missing" if nothing runs without it.
        remedy: the command or action that fixes it; "" if ok.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def check_machine(machine: Machine) -> Iterator[Finding]:
    """Check this machine and this installation, the necessary things first."""
    installed = _version("perilune") is not None
    if installed:
        yield from _check_packages()
    else:
        found = "not installed; only its source is on the path"
        yield Finding("perilune", "missing", found, _pip_install("-e", "."))
    yield from _check_processor(machine)
    yield _check_memory(machine)
    yield _check_gpu(machine)
    yield from _check_programs()
    if installed:
        yield from _check_extras()


def check_home(home: Path) -> Iterator[Finding]:
    """Check free space and type of the file system of the writable directory `home`."""
    free = shutil.disk_usage(home).free
    found = f"{free / _GIB:.1f} GiB free in {home}"
    remedy = "export PERILUNE_HOME=/a/folder/with/room"
    if free >= _DISK_ADVISED:
        yield Finding("disk", "ok", found)
    else:
        yield Finding("disk", "missing" if free < _DISK_NEEDED else "advice", found, remedy)
    kind = _file_system(home)
    if kind in _NETWORK_FILE_SYSTEMS:
        found = f"{home} is on a network file system ({kind}), where SQLite is not safe"
        yield Finding("file system", "advice", found, "export PERILUNE_HOME=/a/local/folder")


def package_versions() -> dict[str, str | None]:
    """Return the installed version of every package that Perilune requires; None if it is absent."""
    installed = _version("perilune") is not None
    return {need.name: _version(need.name) for need in _requirements()} if installed else {}


def _check_packages() -> Iterator[Finding]:
    yield Finding("perilune", "ok", f"{_version('perilune')}, Python {platform.python_version()}")
    needs = _requirements()
    wrong = []
    for need in needs:
        version = _version(need.name)
        if version is None:
            wrong.append((need, "absent"))
        elif not need.specifier.contains(version, prereleases=True):
            wrong.append((need, f"version {version}, needs {need.specifier}"))
    for need, found in wrong:
        yield Finding(need.name, "missing", found, _pip_install(f"{need.name}{need.specifier}"))
    if not wrong:
        yield Finding("packages", "ok", f"all {len(needs)} required packages, in compatible versions")
    if not metadata.entry_points(group="perilune.tasks"):
        remedy = _pip_install("--force-reinstall", "perilune")
        yield Finding("tasks", "missing", "no task plugin is registered", remedy)


def _check_processor(machine: Machine) -> Iterator[Finding]:
    processor = machine.processor
    found = f"{processor.model}, {processor.usable_cores:g} of {processor.logical_cores} cores usable"
    if processor.usable_cores < 1:
        remedy = "give the container at least one core: docker run --cpus 1"
        yield Finding("processor", "advice", found, remedy)
    else:
        yield Finding("processor", "ok", found)
    if processor.architecture in ("x86_64", "AMD64") and "avx2" not in processor.simd:
        found = "no AVX2, so the kernels are several times slower"
        yield Finding("SIMD", "advice", found, "use a processor of 2015 or later")
    else:
        yield Finding("SIMD", "ok", ", ".join(processor.simd) or "not reported by this system")


def _check_memory(machine: Machine) -> Finding:
    usable, total = machine.memory.usable, machine.memory.total
    found = f"{usable / _GIB:.1f} GiB"
    if usable < total:
        found += f" allowed by the control group, of {total / _GIB:.1f} GiB"
    if usable < _MEMORY_NEEDED:
        return Finding("memory", "missing", found, "give the container 4 GiB: docker run --memory 4g")
    if usable < _MEMORY_ADVISED:
        return Finding("memory", "advice", found, "models larger than the tiny preset need 4 GiB or more")
    return Finding("memory", "ok", found)


def _check_gpu(machine: Machine) -> Finding:
    build = _torch_build()
    if machine.gpus:
        found = ", ".join(f"{gpu.name} ({gpu.memory / _GIB:.0f} GiB)" for gpu in machine.gpus)
        if build.get("cuda"):
            found += f"; torch is built for CUDA {build['cuda']}"
            if _version("triton") is None:
                remedy = _pip_install("perilune[gpu]")
                found = f"{found}; Triton, which GPU sampling needs, is absent"
                return Finding("GPU", "missing", found, remedy)
            return Finding("GPU", "ok", found)
        return Finding("GPU", "advice", f"{found}; this torch is built for CPU only", _cuda_torch())
    if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        found = "there is an NVIDIA driver, but its devices cannot be listed"
        return Finding("GPU", "advice", found, _pip_install("perilune[gpu]"))
    if build.get("hip"):
        return Finding("GPU", "ok", f"torch is built for ROCm {build['hip']}")
    return Finding("GPU", "ok", "none, and none is needed")


def check_containers(program: str, template: str) -> Finding:
    """Check that `program`, Docker's or Podman's client, which a template names, reaches its server."""
    command = [program, "version", "--format", "{{.Server.Version}}"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_CLIENT_TIMEOUT_S, check=False
        )
        works, text = answer.returncode == 0, answer.stderr if answer.returncode else answer.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        works, text = False, str(error)
    if works:
        return Finding("containers", "ok", f"{program} {text.strip()}")
    last = (text.strip().splitlines() or ["no output"])[-1]
    found = f"{program}, which the template {template} uses, does not answer: {last}"
    return Finding("containers", "advice", found, f"make `{shlex.join([program, 'ps'])}` work for your user")


def _check_programs() -> Iterator[Finding]:
    yield _check_program("git", "bundles record the commit they ran from", "git")
    yield _check_program(
        "sshd", "the tests of remote execution run", "openssh-server", fallback="/usr/sbin/sshd"
    )
    chromium = (
        _first_program("chromium", "chromium-browser", "google-chrome", "chrome") or _playwright_chromium()
    )
    if chromium:
        yield Finding("Chromium", "ok", chromium)
    else:
        remedy = f"{_pip_install('playwright')} && {_python()} -m playwright install --with-deps chromium"
        yield Finding("Chromium", "advice", "absent; with it the tests of the report run", remedy)


def _check_extras() -> Iterator[Finding]:
    """Check the extras for working on Perilune itself. (`_check_gpu` covers the extra `gpu`.)"""
    for extra, purpose in (("dev", "run the tests"), ("docs", "build the documentation")):
        absent = [need.name for need in _requirements(extra) if _version(need.name) is None]
        if absent:
            more = f" and {len(absent) - MAX_NAMED_PACKAGES} more" if len(absent) > MAX_NAMED_PACKAGES else ""
            found = f"absent: {', '.join(absent[:MAX_NAMED_PACKAGES])}{more}; needed only to {purpose}"
            yield Finding(f"extra {extra}", "advice", found, _pip_install(f"perilune[{extra}]"))
        else:
            yield Finding(f"extra {extra}", "ok", "complete")


def _requirements(extra: str = "") -> list[Requirement]:
    """Return the requirements of Perilune on this platform; with `extra`, those that the extra adds.

    Raises:
        importlib.metadata.PackageNotFoundError: Perilune is not installed.
    """
    # The package's own metadata is the only list of its requirements.
    parsed = [Requirement(text) for text in metadata.requires("perilune") or []]

    def applies(need: Requirement, asked: str) -> bool:
        return need.marker is None or need.marker.evaluate({"extra": asked})

    return [need for need in parsed if applies(need, extra) and not (extra and applies(need, ""))]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_build() -> dict[str, Any]:
    """Return the variables of torch/version.py (cuda, hip), read without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(file)) if file.is_file() else {}


def _cuda_torch() -> str:
    range_ = next((str(need.specifier) for need in _requirements() if need.name == "torch"), "")
    # pip's default index has CUDA builds for Linux; a CPU build came from another index.
    return _pip_install("--isolated", "--force-reinstall", f"torch{range_}")


def _pip_install(*arguments: str) -> str:
    return f"{_python()} -m pip install {shlex.join(arguments)}"


def _python() -> str:
    """Return the shortest command for the running interpreter."""
    program = shutil.which("python")
    same = program is not None and Path(program).parent.samefile(Path(sys.executable).parent)
    return "python" if same else sys.executable


def _check_program(name: str, purpose: str, package: str, *, fallback: str = "") -> Finding:
    program = _first_program(name, fallback)
    if program:
        return Finding(name, "ok", program)
    return Finding(name, "advice", f"absent; with it {purpose}", _system_install(package))


def _first_program(*names: str) -> str:
    return next((path for name in names if name and (path := shutil.which(name))), "")


def _playwright_chromium() -> str:
    """Return the path of a Chromium that Playwright installed outside the search path; "" without one."""
    default = "Library/Caches/ms-playwright" if platform.system() == "Darwin" else ".cache/ms-playwright"
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / default)
    return next((str(path) for path in sorted(folder.glob("chromium*"), reverse=True)), "")


def _system_install(package: str) -> str:
    for manager, verb in (("apt-get", "install"), ("dnf", "install"), ("apk", "add"), ("pacman", "-S")):
        if shutil.which(manager):
            named = package if verb == "install" else package.replace("-server", "")
            return f"sudo {manager} {verb} {named}"
    if shutil.which("brew"):
        return f"brew install {package.replace('-server', '')}"
    return f"install {package} with this system's package manager"


def _file_system(path: Path) -> str:
    """Return the type of the file system of `path`: that of the longest mount point above it."""
    import psutil

    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    above = [str(parent) for parent in (path, *path.parents) if str(parent) in mounts]
    return mounts[above[0]] if above else ""
