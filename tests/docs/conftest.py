"""Fixtures for documentation examples: a shared home, models and experiment, and a folder for each page."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import ROOT, Block
from doc_runner import Runner

from hub_model import put_in_cache, put_in_home
from perilune.bundle.plugin import load_plugin, plugin_names
from perilune.data.generators import registry as teachers
from perilune.environments.core import registry as environments


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of every command; small models replace the downloaded ones."""
    root = tmp_path_factory.mktemp("docs")
    put_in_cache(root / "huggingface", "Qwen/Qwen3-0.6B")
    for name in ("smollm2-135m", "HuggingFaceTB--SmolLM2-360M-Instruct"):
        put_in_home(root / "home", name)
    return os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PERILUNE_HOME": str(root / "home"),
        "HF_HOME": str(root / "huggingface"),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "160",
    }


@pytest.fixture(scope="session")
def experiment(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run a small quickstart, the experiment of most pages."""
    runner = Runner(tmp_path_factory.mktemp("quickstart"), environment)
    runner.do(Block(ROOT / "README.md", 1, "bash", "", "perilune quickstart\n", ""))


@pytest.fixture
def runner(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """A runner in a fresh folder. Modules and plugins that blocks import are unloaded afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("PATH", "PERILUNE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, environment[name])
    made = Runner(tmp_path, environment)
    for path in made.import_paths:
        monkeypatch.syspath_prepend(str(path))
    known = set(sys.modules)
    yield made
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]
    for cached in (plugin_names, load_plugin, environments._list_factories, teachers._list_classes):
        cached.cache_clear()
