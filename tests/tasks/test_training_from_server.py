"""An RL run that samples from a server: `perilune serve` in its own process gets the weights of each step."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from task_cases import metrics, run_task

from perilune.bundle.compare import compare_artifacts
from perilune.errors import RequestError, WorkFailedError
from perilune.files import read_json_lines
from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.config.decoder_config import PRESETS
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.evaluate.stage import EvaluateSpec
from perilune.tasks.rl.spec import RLSpec
from perilune.tasks.rl.update import PolicyUpdater
from perilune.tasks.selfplay.spec import SelfPlaySpec
from perilune.tasks.stage.sampling import RecordingSpec

pytestmark = pytest.mark.slow

CORRECTED = {"off_policy": {"proximal": "learner", "weight": "truncate"}}


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[str]:
    """Serve weights that no run below has; yield the URL."""
    tokenizer = Tokenizer.characters()
    save_checkpoint(folder / "other", new_model("tiny", tokenizer, seed=9), tokenizer)
    options = ["serve", str(folder / "other"), "--weight-updates", "--port", "0", *flags]
    command = [sys.executable, "-m", "perilune.cli.main", *options]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"answers at (http://\S+)", line) for line in process.stderr)))
        try:
            yield found[1].removesuffix("/v1")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server")) as found:
        yield found


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


def test_server_sleeps_while_the_policy_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep, update = [], PolicyUpdater.update

    def observed(self: PolicyUpdater, *arguments: Any) -> Any:
        asleep.append(httpx.get(f"{served}/is_sleeping").json()["is_sleeping"])
        return update(self, *arguments)

    own = run_task(tmp_path / "own", "rl", **CORRECTED)
    monkeypatch.setattr(PolicyUpdater, "update", observed)
    with serving(tmp_path / "server", "--control") as served:
        run = run_task(tmp_path / "run", "rl", engine={"url": served, "sleep": True}, **CORRECTED)
        assert not httpx.get(f"{served}/is_sleeping").json()["is_sleeping"]
    assert asleep and all(asleep)
    assert {change.path for change in compare_artifacts(own, run)} <= {"artifacts/summary.json"}


def test_server_that_cannot_sleep_is_refused_before_training(url: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--control"):
        run_task(tmp_path / "bundle", "rl", engine={"url": url, "sleep": True})


def test_server_without_the_weights_stops_the_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeps = SimpleNamespace(push=lambda *_: SimpleNamespace(seconds=0.0, bytes=0))
    monkeypatch.setattr("perilune.tasks.rl.server.find_server", lambda *_: keeps)
    with pytest.raises(WorkFailedError, match="the sampler has other weights"):
        run_task(tmp_path / "bundle", "rl", seed=2, engine={"url": url, "precision": "float32"})


@pytest.mark.parametrize(
    ("spec", "options", "problem"),
    [
        (RLSpec, {"asynchronous": {}}, "does not work with asynchronous"),
        (RLSpec, {"train_sub_agents": True}, "does not work with sub-agents"),
        (RLSpec, {"temperature": 2.5}, "temperature is 2.5, and servers accept at most 2"),
        (EvaluateSpec, {"temperature": 2.5}, "temperature is 2.5, and servers accept at most 2"),
        (SelfPlaySpec, {}, "samples several policies"),
    ],
)
def test_unsupported_combinations_are_refused(
    spec: type[RecordingSpec], options: dict[str, Any], problem: str
) -> None:
    section = {"checkpoint": "model", "engine": {"url": "http://localhost:8000"}}
    with pytest.raises(ValidationError, match=problem):
        spec.model_validate(section | options)
