"""Stages name the module of their training loop and import it only when they run."""

from importlib import import_module
from typing import Any, get_type_hints

import pytest

from perilune.bundle.plugin import load_plugin, plugin_names
from perilune.bundle.workspace import Workspace
from perilune.tasks.stage.stage import Stage

STAGES = [plugin for name in plugin_names() if isinstance(plugin := load_plugin(name), Stage)]


@pytest.mark.parametrize(
    "stage", [stage for stage in STAGES if type(stage).execute is Stage.execute], ids=lambda stage: stage.name
)
def test_loop_signature_matches_the_spec_of_its_stage(stage: Stage[Any]) -> None:
    hints = get_type_hints(import_module(stage.loop).run)
    assert list(hints.items())[:2] == [("workspace", Workspace), ("spec", stage.spec)]
    assert hints["return"] == dict[str, Any]
