"""The digest of an installed package differs between wheels of the same version."""

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from perilune.bundle.compare import compare_runs
from perilune.bundle.lock import record_digest

INFO = "swapped-1.0.dist-info"


def make_wheel(folder: Path, content: str) -> Path:
    """A wheel with a module, a script and a data file."""
    files = {
        "swapped.py": content,
        "swapped-1.0.data/scripts/swap": "#!python\nimport swapped\n",
        "swapped-1.0.data/data/share/swapped.txt": "data",
        f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: swapped\nVersion: 1.0\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/entry_points.txt": "[console_scripts]\nswapped = swapped:main\n",
    }
    folder.mkdir()
    wheel = folder / "swapped-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        rows = [f"{name},{hash_of(text)},{len(text)}\n" for name, text in files.items()]
        archive.writestr(f"{INFO}/RECORD", "".join([*rows, f"{INFO}/RECORD,,\n"]))
    return wheel


def hash_of(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def install(wheel: Path, prefix: Path, *options: str) -> Path:
    """Installs the wheel with pip under `prefix`; returns the folder of the modules."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--prefix", str(prefix), *options, str(wheel)], check=True)
    (folder,) = prefix.glob("lib/python*/site-packages")
    return folder


def installed(folder: Path) -> Distribution:
    (distribution,) = distributions(path=[str(folder)], name="swapped")
    return distribution


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two installations of a wheel with different options, and one of another wheel of the same version."""
    root = tmp_path_factory.mktemp("swapped")
    first, other = make_wheel(root / "1", "x = 1\n"), make_wheel(root / "2", "x = 2\n")
    return [
        install(first, root / "a"),
        install(first, root / "longer prefix", "--no-compile"),
        install(other, root / "c"),
    ]


def test_record_digest_depends_on_wheel_and_not_on_installation(folders: list[Path]) -> None:
    record = folders[1] / INFO / "RECORD"
    text, scripts = re.subn(
        r"(/bin/swap\w*),sha256=[^,]*", r"\1,sha256=another-interpreter", record.read_text()
    )
    record.write_text(text)
    assert scripts == 2 and text != (folders[0] / INFO / "RECORD").read_text()
    first, again, other = (record_digest(installed(folder)) for folder in folders)
    assert first is not None and first == again != other is not None


def test_record_digest_is_none_without_record_or_when_editable(folders: list[Path], tmp_path: Path) -> None:
    info = tmp_path / INFO
    info.mkdir()
    (info / "METADATA").write_text("Name: swapped\nVersion: 1.0\n")
    assert record_digest(installed(tmp_path)) is None, "no RECORD"
    (info / "RECORD").write_text((folders[0] / INFO / "RECORD").read_text())
    (info / "direct_url.json").write_text('{"url": "file:///here", "dir_info": {"editable": true}}')
    assert record_digest(installed(tmp_path)) is None, "editable"


def test_compare_runs_names_package_with_other_installed_files(
    folders: list[Path], make_attempt: Callable[[str], Path]
) -> None:
    code = (
        "import json, swapped; from perilune.bundle.provenance import precheck; print(json.dumps(precheck()))"
    )
    attempts = [make_attempt(name) for name in "abc"]
    for folder, attempt in zip(folders, attempts, strict=True):
        environment = os.environ | {"PYTHONPATH": str(folder)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        (attempt / "artifacts" / "precheck.json").write_bytes(done.stdout)
    assert compare_runs(attempts[0], attempts[1]).packages == ()
    (change,) = compare_runs(attempts[0], attempts[2]).packages
    assert change.key == "swapped 1.0, installed files"
