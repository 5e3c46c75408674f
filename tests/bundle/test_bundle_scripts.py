"""The files in a bundle's scripts/ work on a machine that has only Python."""

import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from bundle_cases import make_inputs, make_job
from packaging.requirements import Requirement

import perilune
from perilune.bundle.freeze import freeze
from perilune.bundle.lock import requirements_lock
from perilune.bundle.wheel import build_wheel, differing_files, package_files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def package_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests use a copy of the package, because the source may change while they run."""
    copy = tmp_path_factory.mktemp("code") / "perilune"
    shutil.copytree(perilune.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perilune, "__path__", [str(copy)])
        build_wheel.cache_clear()
        yield
    build_wheel.cache_clear()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, data = build_wheel()
    path = tmp_path_factory.mktemp("wheel") / name
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which pip installed the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", str(folder), str(wheel)], check=True)
    return folder


def test_build_wheel_is_reproducible() -> None:
    assert build_wheel.__wrapped__() == build_wheel.__wrapped__()


def test_wheel_contains_no_times_and_no_paths_of_machine(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {member.external_attr >> 16 for member in archive.infolist()} == {0o100644}
        names = archive.namelist()
        assert names == sorted(names)
        assert not any("__pycache__" in name or name.endswith(".pyc") for name in names)
        assert not any(b"direct_url" in archive.read(name) for name in names if name.endswith("RECORD"))


def test_pip_installs_every_file_and_perilune_command(installed: Path) -> None:
    for relative, data in package_files().items():
        assert (installed / "perilune" / relative).read_bytes() == data
    assert (installed / "bin" / "perilune").exists()


def test_installed_wheel_declares_version_and_tasks(installed: Path) -> None:
    code = (
        "from importlib.metadata import version, entry_points\n"
        "import perilune\n"
        "tasks = sorted({point.name for point in entry_points(group='perilune.tasks')})\n"
        "print(perilune.__file__, version('perilune'), *tasks)"
    )
    words = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert words[0] == str(installed / "perilune" / "__init__.py")
    assert words[1] == version("perilune")
    assert {"collect", "evaluate", "rl", "sft"} <= set(words[2:])


def test_wheel_metadata_requires_declared_dependencies(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needs = {Requirement(line.partition(": ")[2]).name for line in lines if line.startswith("Requires-Dist")}
    assert {"torch", "pydantic", "typer", "reasoning-gym"} <= needs


def test_differing_files_names_changed_and_missing_files(wheel: Path, tmp_path: Path) -> None:
    assert differing_files(wheel) == []
    changed = io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for member in old.infolist():
            if member.filename != "perilune/py.typed":
                new.writestr(member, old.read(member) + b"#" * (member.filename == "perilune/files.py"))
    (tmp_path / "changed.whl").write_bytes(changed.getvalue())
    assert differing_files(tmp_path / "changed.whl") == ["perilune/files.py", "perilune/py.typed"]


def test_requirements_lock_pins_installed_versions_of_all_dependencies() -> None:
    lines = [line.partition("  # record sha256:") for line in requirements_lock("sft").splitlines()]
    lock = dict(line.split("==") for line, _, _ in lines)
    assert all(len(digest) == 64 for _, _, digest in lines)
    for name in ("pydantic", "pydantic-core", "torch", "typer", "numpy", "sqlalchemy"):
        assert lock[name] == version(name)
    assert "perilune" not in lock
    assert "pytest" not in lock, "the lock contains a development tool"
    assert list(lock) == sorted(lock)


def test_entrypoint_creates_environment_once_and_runs_command(tmp_path: Path) -> None:
    """Runs every step that a remote machine runs. The lock is empty, so pip needs no package index."""
    command = ("python", "-c", "import sys, perilune; print(perilune.__file__, *sys.argv[1:])")
    freeze(make_job(entrypoint=command), make_inputs(tmp_path / "sources"), tmp_path / "frozen")
    bundle = Path(shutil.copytree(tmp_path / "frozen", tmp_path / "a bundle"))
    lock = bundle / "scripts" / "requirements.lock"
    lock.chmod(0o644)
    lock.write_text("")
    home = tmp_path / "a home"
    offline = {"PERILUNE_HOME": str(home), "PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1"}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(bundle / "scripts" / "entrypoint.sh"), "--flag"],
            env={"PATH": os.environ["PATH"], **offline},
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        )

    first = run()
    file, given, flag = first.stdout.strip().rsplit(" ", 3)[0], str(bundle), "--flag"
    assert first.stdout.strip().endswith(f"{given} {flag}")
    assert file.startswith(str(home / "environments"))
    again = run()
    assert again.stdout == first.stdout
    assert "making" in first.stderr and "making" not in again.stderr


@pytest.mark.thorough
def test_entrypoint_explains_failed_installation(tmp_path: Path) -> None:
    freeze(make_job(), make_inputs(tmp_path / "sources"), tmp_path / "bundle")
    lock = tmp_path / "bundle" / "scripts" / "requirements.lock"
    lock.chmod(0o644)
    lock.write_text("torch==2.6.0+other\n")
    done = subprocess.run(
        [str(tmp_path / "bundle" / "scripts" / "entrypoint.sh")],
        env={"PATH": os.environ["PATH"], "PERILUNE_HOME": str(tmp_path), "PYTHON": sys.executable}
        | {"PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "torch==2.6.0+other may need PIP_EXTRA_INDEX_URL or PERILUNE_ANY_BUILD=1" in done.stderr
    assert not list((tmp_path / "environments").glob("*/complete"))
