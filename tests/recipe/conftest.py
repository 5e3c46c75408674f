"""Task plugins and an environment for these tests, installed through real entry points."""

import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from perilune.bundle import plugin
from perilune.environments.core import registry

MODULE = """
from typing import Annotated, Literal
from pydantic import Field
from perilune.bundle.job import Frozen
from perilune.bundle.plugin import Consumes
from perilune.errors import RequestError

class Bake(Frozen):
    flour: Annotated[str, Consumes("checkpoint")] = Field(description="what it is made of")
    eggs: Annotated[str | None, Consumes("dataset")] = Field(None, description="optional")
    minutes: int = Field(30, gt=0, description="time in the oven")
    heat: float = Field(0.5, ge=0, le=1, description="how hot")
    style: Literal["plain", "fancy"] = Field("plain", description="looks")
    tags: tuple[str, ...] = Field((), description="labels")

class Lay(Frozen):
    hen: str = Field("brown", description="which hen")
    after: Annotated[str | None, Consumes("checkpoint")] = Field(None, description="what she waits for")

class Plugin:
    def __init__(self, name, spec, produces):
        self.name, self.spec, self.produces, self.output = name, spec, produces, "artifacts/x"
    def plan(self, job):
        return {}
    def run(self, workspace):
        return {}

class Kitchen(Frozen):
    id: Literal["kitchen"] = Field(description="this environment")
    meal: Literal["lunch", "dinner"] = Field("lunch", description="which meal")
    guests: int = Field(2, ge=0, description="who comes")

class KitchenEnvironment:
    Spec = Kitchen
    def __init__(self, spec):
        if spec.meal == "dinner" and spec.guests > 4:
            raise RequestError("too many", where="environment.guests", remedy="4 at most")

bake = Plugin("bake", Bake, "checkpoint")
lay = Plugin("lay", Lay, "dataset")
"""


@pytest.fixture(scope="session")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on sys.path, installs the tasks `bake` and `lay`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "kitchen_tasks.py").write_text(MODULE)
    info = folder / "kitchen-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kitchen\nVersion: 1.0\n")
    points = "[perilune.tasks]\nbake = kitchen_tasks:bake\nlay = kitchen_tasks:lay\n"
    points += "[perilune.environments]\nkitchen = kitchen_tasks:KitchenEnvironment\n"
    (info / "entry_points.txt").write_text(points)
    return folder


@pytest.fixture
def tasks(kitchen: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the tasks `bake` and `lay` and the environment `kitchen` for one test."""
    monkeypatch.syspath_prepend(str(kitchen))
    _forget()
    yield
    _forget()
    sys.modules.pop("kitchen_tasks", None)


def _forget() -> None:
    invalidate_caches()
    for cached in (plugin.plugin_names, plugin.load_plugin, registry._list_factories):
        cached.cache_clear()
