"""Records the loaded code, packages and machine of a run, from inside its process."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import ModuleType
from typing import Any

import perilune
from perilune.bundle.lock import editable_root, read_metadata, record_digest
from perilune.bundle.machine import describe_machine
from perilune.bundle.secret_sources import register_secrets
from perilune.bundle.wheel import differing_files
from perilune.bundle.workspace import Workspace
from perilune.files import sha256_bytes, write_atomic, write_json
from perilune.redaction import KNOWN_SECRETS

MAX_PATCH_BYTES = 1 << 20  # largest recorded patch of a dirty checkout, in bytes
_UNTRACKED_LIMIT = 100  # names
_GIT_TIMEOUT_S = 20  # seconds


def record_precheck(workspace: Workspace) -> dict[str, Any]:
    """Write artifacts/precheck.json, and artifacts/source.patch if the code runs from a dirty checkout.

    The process of the task calls this after its imports. Adds to the facts of `precheck` the key `code`: the
    source files that differ from the wheel in the bundle.

    Returns:
        The contents of precheck.json.
    """
    facts = precheck()
    wheels = sorted((workspace.root / "scripts").glob("*.whl"))
    facts["code"] = {"differs_from_bundle": [name for wheel in wheels for name in differing_files(wheel)]}
    if facts["git"] is not None and facts["git"]["dirty"]:
        patch, complete = _make_patch(Path(facts["git"]["checkout"]))
        register_secrets(workspace.job.secrets)
        patch = KNOWN_SECRETS.redact(patch)
        facts["git"]["patch"] = {"sha256": sha256_bytes(patch), "size": len(patch), "whole": complete}
        write_atomic(workspace.artifacts / "source.patch", patch)
    write_json(workspace.artifacts / "precheck.json", facts)
    return facts


def precheck() -> dict[str, Any]:
    """Observe this process: {python, packages, torch, kernels, machine, git, environment}.

    packages: for each loaded top-level module outside the standard library, its file, and the name, version
    and `record_digest` of its distribution (None if the file belongs to no distribution).
    torch: None unless it is loaded; this function never imports it.
    kernels: whether the C kernels are loaded, and why not; None unless their module is loaded.
    git: None unless a git checkout tracks the files of the package.
    environment: names of variables, never values.
    """
    return {
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "build": " ".join(platform.python_build()),
            "compiler": platform.python_compiler(),
            "executable": sys.executable,
            "prefix": sys.prefix,
            "optimize": sys.flags.optimize,
            "hash_randomization": bool(sys.flags.hash_randomization),
        },
        "packages": loaded_packages(),
        "torch": _describe_torch(sys.modules.get("torch")),
        "kernels": _describe_kernels(sys.modules.get("perilune.models.native.build")),
        "machine": describe_machine(),
        "git": _describe_git(Path(perilune.__path__[0]).resolve()),
        "environment": sorted(os.environ),
    }


def loaded_packages() -> dict[str, dict[str, Any]]:
    """Return the loaded top-level modules outside the standard library.

    By name: {file, distribution, version, editable, record}.
    """
    modules = {}
    for name, module in sys.modules.copy().items():
        standard = name in sys.stdlib_module_names or name.startswith(("__", "_sysconfigdata"))
        file = _module_file(module)
        if "." not in name and not standard and file:
            modules[name] = file
    return {name: {"file": file, **_ownership(name, Path(file))} for name, file in sorted(modules.items())}


def _module_file(module: ModuleType) -> str:
    """Return the file or folder of a module; "" if it has none."""
    file = getattr(module, "__file__", None)
    if file:
        return str(file)
    paths = list(getattr(module, "__path__", None) or [])
    return str(paths[0]) if paths else ""


@cache
def _owners() -> dict[str, list[Distribution]]:
    """Return the installed distributions by the modules they provide, in the order of sys.path."""
    owners: dict[str, list[Distribution]] = {}
    for installed in distributions():
        for name in _top_level(installed):
            owners.setdefault(name, []).append(installed)
    return owners


def _top_level(installed: Distribution) -> set[str]:
    text = installed.read_text("top_level.txt")
    if text:
        return set(text.split())
    record = installed.read_text("RECORD")
    if record is None:
        return {installed.name.replace("-", "_"), installed.name.replace("-", "_").lower()}
    names = set()
    for start in {line.partition("/")[0] for line in record.splitlines()}:
        first = start.partition(",")[0]
        if first.endswith(".dist-info"):  # faster than parsing METADATA
            name = first.split("-", 1)[0]
            names |= {name, name.lower()}
        elif first not in {"..", ""}:
            names.add(first.split(".", 1)[0])
    return names


@cache
def _ownership(name: str, file: Path) -> dict[str, Any]:
    """Return the distribution that contains the file of a module."""
    for installed in _owners().get(name, []):
        editable = editable_root(installed)
        home = editable or Path(str(installed.locate_file("")))
        if file.is_relative_to(home) or file.resolve().is_relative_to(home.resolve()):
            distribution, version, _ = read_metadata(installed)
            return {
                "distribution": distribution,
                "version": version,
                "editable": editable is not None,
                "record": record_digest(installed),
            }
    return {"distribution": None, "version": None, "editable": False, "record": None}


def _describe_torch(torch: Any) -> dict[str, Any] | None:
    if torch is None:
        return None
    return {
        "version": torch.__version__,
        "git_version": torch.version.git_version,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "config": torch.__config__.show(),
    }


def _describe_kernels(build: Any) -> dict[str, Any] | None:
    if build is None:
        return None
    kernels = build.native()
    return {"loaded": kernels.library is not None, "reason": kernels.reason}


def _describe_git(package: Path) -> dict[str, Any] | None:
    """Return the commit and state of the checkout that the package runs from."""
    checkout = _find_checkout(package)
    status = checkout and _run_git(Path(checkout), "status", "--porcelain=v2", "--branch")
    if not status:
        return None
    head, *lines = [line for line in status.splitlines() if line.startswith("# branch.oid") or line[0] != "#"]
    untracked = [line[2:] for line in lines if line.startswith("?")]
    commit = head.rpartition(" ")[2]
    return {
        "checkout": checkout,
        "commit": commit if commit != "(initial)" else None,  # before the first commit
        "dirty": bool(lines),
        "changed": len(lines) - len(untracked),
        "untracked": untracked[:_UNTRACKED_LIMIT],
    }


@cache
def _find_checkout(package: Path) -> str | None:
    """Return the root of the checkout that tracks the files of the package, or None."""
    if _run_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    root = _run_git(package, "rev-parse", "--show-toplevel")
    return root.strip() if root else None


def _make_patch(checkout: Path) -> tuple[bytes, bool]:
    """Return the tracked changes against HEAD, at most `MAX_PATCH_BYTES`, and whether they are complete."""
    command = [*_GIT, "-C", str(checkout), "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_git_environment()
    ) as git:
        assert git.stdout is not None
        patch = git.stdout.read(MAX_PATCH_BYTES + 1)
        git.kill()  # the rest of its output is not needed
    return patch[:MAX_PATCH_BYTES], len(patch) <= MAX_PATCH_BYTES


# Do not take the index lock, and do not run a program from the repository's settings.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def _run_git(directory: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if git is missing or fails."""
    try:
        process = subprocess.run(
            [*_GIT, "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
            env=_git_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout if process.returncode == 0 else None


def _git_environment() -> Mapping[str, str]:
    """Return the environment without GIT_* variables, because those of a hook point to another repository."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
