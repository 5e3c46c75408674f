"""An RL run that samples from a server: `perilune serve` in its own process gets the weights of each step."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from task_cases import metrics, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.errors import WorkFailedError
from perilune.files import read_json_lines
from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.selfplay.spec import SelfPlaySpec

pytestmark = pytest.mark.slow

CORRECTED = {"off_policy": {"proximal": "learner", "weight": "truncate"}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with other weights than any run below."""
    folder, tokenizer = tmp_path_factory.mktemp("server") / "other", Tokenizer.characters()
    save_checkpoint(folder, new_model("tiny", tokenizer, seed=9), tokenizer)
    options = ["serve", str(folder), "--weight-updates", "--port", "0"]
    command = [sys.executable, "-m", "perilune.cli.main", *options]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"answers at (http://\S+)", line) for line in process.stderr)))
        yield found[1]
        process.kill()


def test_run_equals_one_with_the_own_engine(url: str, tmp_path: Path) -> None:
    own = run_task(tmp_path / "own", "rl", **CORRECTED)
    served = run_task(tmp_path / "served", "rl", engine={"url": url}, **CORRECTED)
    assert {change.path for change in compare_artifacts(own, served)} <= {"artifacts/summary.json"}
    assert max(line["grad_norm"] or 0.0 for line in metrics(served)) > 0
    for line in read_json_lines(served / "artifacts" / "timings.jsonl"):
        assert line["publish_lag"] > 0 and line["weights_bytes"] > 1_000_000
    assert not (served / "runtime" / "published").exists()


def test_turn_without_room_in_the_context_window_ends_the_episode(url: str, tmp_path: Path) -> None:
    room = PRESETS["tiny"].max_position_embeddings
    talk = {"id": "factory", "factory": "task_environments:Talk"}
    options: dict[str, Any] = {"environment": talk, "steps": 1, "prompts": 2, "max_tokens": room - 20}
    own = run_task(tmp_path / "own", "rl", **options, **CORRECTED)
    served = run_task(tmp_path / "served", "rl", engine={"url": url}, **options, **CORRECTED)
    assert {change.path for change in compare_artifacts(own, served)} <= {"artifacts/summary.json"}
    assert metrics(served)[0]["truncated"] > 0


def test_server_without_the_weights_stops_the_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeps = SimpleNamespace(push=lambda *_: SimpleNamespace(seconds=0.0, bytes=0))
    monkeypatch.setattr("perilune.weights.push.find_server", lambda *_: keeps)
    with pytest.raises(WorkFailedError, match="the sampler has other weights"):
        run_task(tmp_path / "bundle", "rl", seed=2, engine={"url": url, "precision": "float32"})


@pytest.mark.parametrize(
    ("spec", "options", "problem"),
    [
        (RLSpec, {"asynchronous": {}}, "does not work with asynchronous"),
        (RLSpec, {"train_sub_agents": True}, "does not work with sub-agents"),
        (RLSpec, {"temperature": 2.5}, "temperature is 2.5, and servers accept at most 2"),
        (SelfPlaySpec, {}, "samples several policies"),
    ],
)
def test_unsupported_combinations_are_refused(
    spec: type[RLSpec], options: dict[str, Any], problem: str
) -> None:
    section = {"checkpoint": "model", "engine": {"url": "http://localhost:8000"}}
    with pytest.raises(ValidationError, match=problem):
        spec.model_validate(section | options)
