"""What travels in scripts/ works on a machine that has nothing but Python."""

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
def _one_state_of_the_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A copy of the package that nobody edits while the tests run."""
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
    """The wheel installed by pip into a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--target", str(folder), str(wheel)], check=True)
    return folder


def test_the_wheel_is_the_same_every_time() -> None:
    assert build_wheel.__wrapped__() == build_wheel.__wrapped__()


def test_the_wheel_names_no_time_and_no_place(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {member.external_attr >> 16 for member in archive.infolist()} == {0o100644}
        names = archive.namelist()
        assert names == sorted(names)
        assert not any("__pycache__" in name or name.endswith(".pyc") for name in names)
        assert not any(b"direct_url" in archive.read(name) for name in names if name.endswith("RECORD"))


def test_pip_installs_every_file_and_the_command(installed: Path) -> None:
    for relative, data in package_files().items():
        assert (installed / "perilune" / relative).read_bytes() == data
    assert (installed / "bin" / "perilune").exists()


def test_the_installed_package_knows_its_version_and_its_tasks(installed: Path) -> None:
    code = (
        "from importlib.metadata import version, entry_points\n"
        "import perilune\n"
        "tasks = sorted({point.name for point in entry_points(group='perilune.tasks')})\n"
        "print(perilune.__file__, version('perilune'), *tasks)"
    )
    said = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert said[0] == str(installed / "perilune" / "__init__.py")
    assert said[1] == version("perilune")
    assert {"collect", "evaluate", "rl", "sft"} <= set(said[2:])


def test_the_metadata_asks_for_the_declared_dependencies(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needs = {Requirement(line.partition(": ")[2]).name for line in lines if line.startswith("Requires-Dist")}
    assert {"torch", "pydantic", "typer", "reasoning-gym"} <= needs


def test_changed_code_is_named(wheel: Path, tmp_path: Path) -> None:
    assert differing_files(wheel) == []
    changed = io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for member in old.infolist():
            if member.filename != "perilune/py.typed":
                new.writestr(member, old.read(member) + b"#" * (member.filename == "perilune/files.py"))
    (tmp_path / "changed.whl").write_bytes(changed.getvalue())
    assert differing_files(tmp_path / "changed.whl") == ["perilune/files.py", "perilune/py.typed"]


def test_the_lock_holds_the_installed_versions_of_the_whole_closure() -> None:
    lines = [line.partition("  # record sha256:") for line in requirements_lock("sft").splitlines()]
    lock = dict(line.split("==") for line, _, _ in lines)
    assert all(len(digest) == 64 for _, _, digest in lines)
    for name in ("pydantic", "pydantic-core", "torch", "typer", "numpy", "sqlalchemy"):
        assert lock[name] == version(name)
    assert "perilune" not in lock
    assert "pytest" not in lock, "development tools are no part of a run"
    assert list(lock) == sorted(lock)


def test_the_entrypoint_makes_an_environment_once_and_runs_the_command(tmp_path: Path) -> None:
    """The whole way of a remote machine, with a lock that needs no index."""
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
def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path) -> None:
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
