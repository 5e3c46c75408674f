"""Provenance: loaded packages, the git checkout, and names of environment variables without their values."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import perilune
from perilune.bundle import provenance
from perilune.bundle.provenance import loaded_packages, precheck, record_precheck
from perilune.bundle.workspace import Workspace
from perilune.files import sha256_file


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean git checkout that contains the running perilune package."""
    root = tmp_path / "checkout"
    package = root / "src" / "perilune"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("# first\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(perilune, "__path__", [str(package)])
    return root


def git(root: Path, *arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *arguments], cwd=root, env=clean, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def with_secret(bundle: Path, name: str) -> Workspace:
    job = json.loads((bundle / "job.json").read_text())
    (bundle / "job.json").chmod(0o644)
    (bundle / "job.json").write_text(json.dumps(job | {"secrets": [name]}))
    return Workspace(bundle)


def test_loaded_packages_lists_imported_packages() -> None:
    packages = loaded_packages()
    assert packages["pytest"]["version"] == pytest.__version__
    assert packages["pytest"]["file"] == pytest.__file__
    assert packages["perilune"]["distribution"] == "perilune"
    assert "json" not in packages and "os" not in packages


def test_loaded_packages_gives_no_version_for_module_shadowing_package(tmp_path: Path) -> None:
    """A file on the path shadows an installed package, whose version would be wrong for the file."""
    (tmp_path / "yaml.py").write_text("shadow = True\n")
    code = (
        "import yaml, json\nfrom perilune.bundle.provenance import loaded_packages\n"
        "print(json.dumps(loaded_packages()['yaml']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "file": str(tmp_path / "yaml.py"),
        "distribution": None,
        "version": None,
        "editable": False,
        "record": None,
    }


def test_precheck_describes_loaded_torch_without_importing_torch() -> None:
    code = (
        "import sys, json\nfrom perilune.bundle.provenance import precheck\n"
        "assert precheck()['torch'] is None and 'torch' not in sys.modules\n"
        "import torch\ntorch.set_num_threads(1)\nprint(json.dumps(precheck()['torch']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["threads"] == 1
    assert "PyTorch built with" in facts["config"]


def test_precheck_records_names_of_environment_variables_without_values(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_CANARY", "canary-4711")
    record_precheck(Workspace(bundle))
    written = (bundle / "artifacts" / "precheck.json").read_text()
    assert "MY_CANARY" in json.loads(written)["environment"]
    assert "canary-4711" not in written


def test_precheck_is_json_with_expected_keys() -> None:
    facts = precheck()
    assert facts.keys() == {"python", "packages", "torch", "kernels", "machine", "git", "environment"}
    assert json.loads(json.dumps(facts)) == facts


def test_precheck_records_commit_of_clean_checkout(checkout: Path, bundle: Path) -> None:
    facts = record_precheck(Workspace(bundle))["git"]
    assert facts["commit"] == git(checkout, "rev-parse", "HEAD")
    assert (facts["dirty"], facts["changed"], facts["untracked"]) == (False, 0, [])
    assert not (bundle / "artifacts" / "source.patch").exists()


def test_precheck_saves_patch_of_dirty_checkout(checkout: Path, bundle: Path) -> None:
    source = checkout / "src" / "perilune" / "__init__.py"
    source.write_text("# changed\n")
    (checkout / "new.py").touch()
    facts = record_precheck(Workspace(bundle))["git"]
    assert (facts["dirty"], facts["changed"], facts["untracked"]) == (True, 1, ["new.py"])
    patch = bundle / "artifacts" / "source.patch"
    assert facts["patch"] == {"sha256": sha256_file(patch), "size": patch.stat().st_size, "whole": True}
    git(checkout, "checkout", "--quiet", ".")
    git(checkout, "apply", str(patch))
    assert source.read_text() == "# changed\n"


def test_precheck_limits_patch_size(checkout: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MAX_PATCH_BYTES", 1000)
    (checkout / "src" / "perilune" / "__init__.py").write_text("# changed\n" * 100_000)
    facts = record_precheck(Workspace(bundle))["git"]["patch"]
    assert (facts["size"], facts["whole"]) == (1000, False)


def test_precheck_redacts_secret_in_patch(
    checkout: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-4711")
    (checkout / "src" / "perilune" / "__init__.py").write_text("token = 'canary-4711'\n")
    record_precheck(with_secret(bundle, "HF_TOKEN"))
    patch = (bundle / "artifacts" / "source.patch").read_text()
    assert "[HF_TOKEN]" in patch and "canary-4711" not in patch


def test_precheck_ignores_checkout_that_contains_installed_perilune(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = checkout / ".venv" / "site-packages" / "perilune"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    monkeypatch.setattr(perilune, "__path__", [str(installed)])
    assert precheck()["git"] is None


def test_precheck_ignores_git_dir_variable(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a git hook, GIT_DIR points at the repository of the hook."""
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert precheck()["git"]["commit"] == git(checkout, "rev-parse", "HEAD")


def test_precheck_records_no_commit_without_git_command(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert precheck()["git"] is None


def test_precheck_names_files_that_differ_from_bundle(bundle: Path, checkout: Path) -> None:
    """The checkout's package has one file, and its contents differ from the bundle's."""
    differing = record_precheck(Workspace(bundle))["code"]["differs_from_bundle"]
    assert {"perilune/__init__.py", "perilune/errors.py"} <= set(differing)
