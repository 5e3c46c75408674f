"""`perilune traces` on the episodes of a stage: record, run, suite, fork, shrink and gate."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from task_cases import make_bundle, make_job, run_in, run_task

from perilune.bundle.digest import contents_digest, source_files
from perilune.cli.main import main
from perilune.data.episodes_file import read_episodes, write_episodes
from perilune.environments import Transcript, make_environment
from perilune.errors import RequestError
from perilune.files import sha256_file
from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.text.tokenizer import Tokenizer
from perilune.traces.suite import Suite, write_suite

Run = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of an untrained model on the calculator environment."""
    root = tmp_path_factory.mktemp("traces")
    return evaluated(root, {"id": "calculator"}, Tokenizer.characters("0123456789+*=;?\n"), max_tokens=12)


def evaluated(root: Path, environment: dict[str, Any], tokenizer: Tokenizer, **options: Any) -> Path:
    """An evaluation of an untrained model."""
    save_checkpoint(root / "weights", new_model("tiny", tokenizer, 3), tokenizer)
    inputs = {"checkpoint": root / "weights"}
    job = make_job("evaluate", environment=environment, inputs=inputs, **options)
    files = [(name, sha256_file(path)) for name, path in source_files(root / "weights")]
    named = job.inputs[0].model_copy(update={"digest": contents_digest(files)})
    return run_in(make_bundle(root / "attempt", job.model_copy(update={"inputs": (named,)}), inputs))


@pytest.fixture
def perilune(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, Any]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["traces", *map(str, arguments), "--json"])
        output = capsys.readouterr()
        return int(left.value.code or 0), json.loads(output.out) if output.out else output.err

    return run


def test_record_and_run_replay_episodes_of_a_stage(attempt: Path, tmp_path: Path, perilune: Run) -> None:
    suite, weights = tmp_path / "suite", attempt / "inputs" / "checkpoint"
    code, recorded = perilune("record", attempt, "--out", suite)
    assert code == 0 and not recorded["refused"] and len(recorded["cases"]) == 6 * 4 + 6  # samples and greedy
    for mode in ("harness", "rescore"):
        code, report = perilune("run", suite, "--mode", mode)
        assert (code, report["failed"], report["cases"]) == (0, 0, len(recorded["cases"]))
    code, report = perilune("run", suite, "--mode", "exact", "--checkpoint", weights)
    assert (code, report["failed"], report["other_weights"]) == (0, 0, 0)

    tokenizer = Tokenizer.load(weights)
    save_checkpoint(tmp_path / "other", new_model("tiny", tokenizer, 4), tokenizer)
    code, message = perilune("run", suite, "--mode", "exact", "--checkpoint", tmp_path / "other")
    assert code == 2 and "sampled no cassette" in message
    assert perilune("run", suite, "--mode", "exact")[0] == 2
    assert "the folder holds a suite" in perilune("record", attempt, "--out", suite)[1]
    assert "no episode fulfils" in perilune("record", attempt, "--out", suite, "--where", "reward > 5")[1]


def test_episodes_with_sub_agents_replay_and_those_without_tokens_are_refused(
    tmp_path: Path, perilune: Run
) -> None:
    environment = {"id": "factory", "factory": "task_environments:Team"}
    tokenizer = Tokenizer.characters(" 0123456789[]=begindo")
    attempt = evaluated(tmp_path, environment, tokenizer, tasks=8, samples=8, max_tokens=80)
    suite, empty, where = tmp_path / "suite", tmp_path / "empty", ("--where", "metrics.sub_agents > 0")
    code, recorded = perilune("record", attempt, *where, "--out", suite)
    assert code == 0 and recorded["cases"] and not recorded["refused"], recorded
    exact = ["--mode", "exact", "--checkpoint", attempt / "inputs" / "checkpoint"]
    for options in (["--mode", "harness"], ["--mode", "rescore"], exact):
        code, report = perilune("run", suite, *options)
        assert (code, report["failed"], report["cases"]) == (0, 0, len(recorded["cases"]))
    for path in attempt.rglob("*.parquet"):
        episodes = read_episodes(path)
        spans = [[replace(span, token_ids=(), loss_mask=()) for span in one.spans] for one in episodes]
        write_episodes(
            path, [replace(one, spans=tuple(own)) for one, own in zip(episodes, spans, strict=True)]
        )
    for command in ("suite", "record"):
        code, message = perilune(command, attempt, *where, "--out", empty)
        assert code == 2 and "an earlier version of Perilune wrote them" in message and not empty.exists()


def test_episodes_with_auxiliary_rewards_keep_the_reward_of_the_environment(
    tmp_path: Path, perilune: Run
) -> None:
    weights = {"weights": {"digits": 2.0}, "until": 1.0}
    options = {"steps": 2, "prompts": 2, "samples": 4, "max_tokens": 80}
    environment = {"id": "factory", "factory": "task_environments:Talk"}
    attempt = run_task(tmp_path, "rl", environment=environment, auxiliary_rewards=weights, **options)
    code, recorded = perilune("record", attempt, "--out", tmp_path / "suite")
    assert code == 0 and not recorded["refused"] and recorded["cases"], recorded
    tracks = [tape.tracks[0].verdict for tape in Suite(tmp_path / "suite").cassettes.values()]
    assert all(verdict.reward == pytest.approx(verdict.terms.get("digits", 0.0)) for verdict in tracks)
    assert any(verdict.reward for verdict in tracks)


def test_suite_fork_and_shrink(attempt: Path, tmp_path: Path, perilune: Run) -> None:
    suite, weights = tmp_path / "suite", attempt / "inputs" / "checkpoint"
    options = ("--where", "truncated", "--each", 6, "--hold-out", 0.5, "--out", suite)
    _, report = perilune("suite", attempt, *options)
    causes = [case["cause"] for case in report["cases"]]
    assert 2 <= len(causes) <= 6 * len(set(causes)) and all("cut off" in cause for cause in causes)
    parts = [perilune("run", suite, "--part", part)[1]["cases"] for part in ("shown", "held-out", "all")]
    assert parts[0] + parts[1] == parts[2] == len(causes)
    digest = report["cases"][0]["digest"]
    code, forked = perilune("fork", suite, digest, "--after", 0, "--checkpoint", weights, "--samples", 8)
    assert code == 0 and len(forked["rewards"]) == 8 and forked["pass_rate"]["mean"] <= 1
    assert "samples none" in perilune("fork", suite, digest, "--after", 99, "--checkpoint", weights)[1]
    code, small = perilune("shrink", suite, digest, "--out", tmp_path / "small")
    assert code == 0 and small["mean_share_of_tokens"] < 1
    assert perilune("run", tmp_path / "small")[0] == 0


def test_run_reports_changes_until_they_are_accepted(attempt: Path, tmp_path: Path, perilune: Run) -> None:
    """A changed expectation fails the run until --accept, which prints the difference."""
    suite = tmp_path / "suite"
    perilune("record", attempt, "--most", 2, "--out", suite)
    index = json.loads((suite / "suite.json").read_text())
    _, report = perilune("run", suite)
    first = index["cases"][0]
    code, _ = perilune("run", suite, "--accept")
    assert code == 0 and json.loads((suite / "suite.json").read_text()) == index
    cassette = json.loads((suite / "cassettes" / f"{first['digest']}.json").read_text())
    verdict = cassette["tracks"][0]["verdict"] | {"reward": 0.5}
    first["accepted"] = [
        {"player": 0, "verdict": verdict, "texts": [], "seen": [], "tokens": []},
    ]
    (suite / "suite.json").write_text(json.dumps(index))
    code, report = perilune("run", suite)
    kinds = {change["kind"] for change in report["results"][0]["differences"]}
    assert (code, report["failed"]) == (1, 1) and {"reward", "turns"} <= kinds
    assert report["reward"]["change"]["mean"] < 0
    code, report = perilune("run", suite, "--accept")
    assert code == 0 and '-   "reward": 0.5' in report["accepted"]
    assert perilune("run", suite)[0] == 0
    code, message = perilune("run", suite, "--accept", "--mode", "rescore")
    assert code == 2 and "--mode" in message


def test_gate_fails_for_a_worse_checkpoint(
    attempt: Path, tmp_path: Path, perilune: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))
    weights = attempt / "inputs" / "checkpoint"
    perilune("suite", attempt, "--where", "truncated", "--each", 2, "--out", tmp_path / "made")
    suite = Suite(tmp_path / "made")
    # The recorded verdicts claim that every episode was right, which an untrained model cannot repeat.
    solved = []
    for case in suite.index.cases:
        cassette = suite.cassettes[case.digest]
        (track,) = cassette.tracks
        right = track.model_copy(update={"verdict": track.verdict.model_copy(update={"reward": 1.0})})
        cassette = cassette.model_copy(update={"tracks": (right,)})
        solved.append((case.model_copy(update={"digest": cassette.digest}), cassette))
    tokenizers = {cassette.tokenizer: suite.tokenizer(cassette.tokenizer) for _, cassette in solved}
    write_suite(tmp_path / "suite", solved, tokenizers, "")

    code, report = perilune("gate", tmp_path / "suite", weights, "--samples", 2)
    tasks = {cassette.task.task_id for _, cassette in solved}
    assert (code, report["passed"], report["tasks"]) == (1, False, len(tasks))
    assert (report["then"]["mean"], report["now"]["mean"], report["change"]["mean"]) == (1.0, 0.0, -1.0)
    code, report = perilune("gate", tmp_path / "suite", weights, "--samples", 2, "--loss", 1)
    assert (code, report["passed"]) == (0, True)
    code, report = perilune("gate", tmp_path / "suite", weights, "--samples", 2, "--against", weights)
    assert (code, report["passed"], report["change"]) == (0, True, {"mean": 0.0, "low": 0.0, "high": 0.0})


def test_suite_is_an_environment_of_its_recorded_environments(
    attempt: Path, tmp_path: Path, perilune: Run
) -> None:
    perilune("suite", attempt, "--each", 1, "--hold-out", 0.5, "--out", tmp_path / "made")
    suite = Suite(tmp_path / "made")
    case = suite.index.cases[0]
    plain = suite.cassettes[case.digest]
    mixed = plain.model_copy(
        update={
            "environment": {"id": "mixture", "parts": {"sums": {**plain.environment, "weight": 2.0}}},
            "task": plain.task.model_copy(update={"task_id": f"sums/{plain.task.task_id}"}),
        }
    )
    other = plain.model_copy(update={"environment": {**plain.environment, "turns": 8}})
    pairs = [(case.model_copy(update={"digest": trace.digest}), trace) for trace in (plain, mixed, other)]
    write_suite(tmp_path / "suite", pairs, {plain.tokenizer: suite.tokenizer(plain.tokenizer)}, "")
    environment: Any = make_environment({"id": "suite", "path": str(tmp_path / "suite")})
    tasks = list(environment.tasks("heldout", 0))
    assert len(tasks) == len(environment.parts) == 2 and len({task.task_id for task in tasks}) == 2
    for task in tasks:
        gold = environment.gold(task)
        assert environment.score(task, gold).reward == 1.0
        assert environment.score(task, Transcript("no")).reward < 1.0
    assert sum(map(len, environment.recorded().values())) == 3
    with pytest.raises(RequestError, match="has no cases in the part"):
        part = "shown" if case.held_out else "held-out"
        make_environment({"id": "suite", "path": str(tmp_path / "suite"), "part": part})
