"""The pairs, preference and reward_model stages, and rl on a reward model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from task_cases import (
    DIGITS,
    episodes,
    figures_of,
    make_bundle,
    make_job,
    metrics,
    run_in,
    run_task,
    summary,
)

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes
from perilune.data.preferences import PreferenceRecord, parse_preference
from perilune.data.sources import read_rows
from perilune.engine.engine import Engine
from perilune.errors import RequestError, WorkFailedError
from perilune.models.reward_model import load_reward_model
from perilune.models.text.tokenizer import Tokenizer
from perilune.tasks.checks import gold_watch
from perilune.tasks.checks.gold_watch import GoldWatch, kl_from_start
from perilune.tasks.stage.policy import load_recipe_model
from perilune.tasks.supervised.preference import CollapseAlarm
from perilune.tasks.supervised.preference_data import PreferenceData
from perilune.tasks.supervised.tokens import RowReader

ENDS = {**DIGITS, "factory": "task_environments:Ends"}


def read_preferences(path: Path) -> list[PreferenceRecord]:
    return [parse_preference(row.value, row.place) for row in read_rows(path)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs sampled from an untrained policy."""
    return run_task(tmp_path_factory.mktemp("pairs") / "pairs", "pairs", environment=ENDS)


@pytest.fixture(scope="module")
def trained(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A preference stage on those pairs."""
    root = tmp_path_factory.mktemp("preference") / "dpo"
    return run_task(root, "preference", inputs={"data": pairs / "artifacts/pairs"})


def test_stage_that_stops_early_is_validated(pairs: Path, tmp_path: Path) -> None:
    only_data = {"every": 1, "tasks": 0, "stop_after": 1}
    stopped = run_task(
        tmp_path / "b", "preference", inputs={"data": pairs / "artifacts/pairs"}, environment=ENDS, lr=1e-12,
        steps=8, validate_every=8, eval=only_data,
    )  # fmt: skip
    report = summary(stopped)
    assert report["steps"] < 8
    assert report["validation"]["validation_accuracy"] == metrics(stopped)[-1]["eval/data/accuracy"]


def test_pairs_hold_a_better_and_a_worse_answer_to_the_same_task(pairs: Path) -> None:
    records = read_preferences(pairs / "artifacts" / "pairs")
    judged = episodes(pairs)
    rewards = dict(zip(zip(judged.task_id, judged.text, strict=True), judged.reward, strict=True))
    cut = set(judged.text[judged.truncated])
    for record in records:
        better, worse = record.chosen[0]["content"], record.rejected[0]["content"]
        assert record.chosen_score == rewards[record.task_id, better]
        assert record.rejected_score == rewards[record.task_id, worse]
        assert record.chosen_score - record.rejected_score >= 0.1
        assert not {better, worse} <= cut
    report = summary(pairs)
    assert report["rows"] == len(records) > 0
    assert report["tasks_without_pair"] == 24 - len({record.task_id for record in records})
    assert metrics(pairs)[0]["rows"] == len(records)


def test_policy_without_right_answers_gives_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(WorkFailedError, match="no two of 96 answers make a pair"):
        run_task(tmp_path / "b", "pairs", environment={**DIGITS, "equal": 0.0})


def test_preference_writes_metrics_and_summary(trained: Path, pairs: Path) -> None:
    lines = metrics(trained)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["margin"] == pytest.approx(0, abs=1e-5)  # the policy starts as the reference
    assert lines[-1]["margin"] > 0
    assert "validation_accuracy" not in lines[0]
    assert 0 <= lines[-1]["validation_accuracy"] <= 1
    report = summary(trained)
    assert report["pairs"] + report["validation_pairs"] == summary(pairs)["rows"]
    assert report["algorithm"] == "dpo"
    assert report["collapse_step"] is None
    assert (trained / "artifacts/checkpoints/final/model.safetensors").exists()


def test_evaluation_loss_equals_the_validation_loss(pairs: Path, tmp_path: Path) -> None:
    bundle = run_task(
        tmp_path / "b", "preference", inputs={"data": pairs / "artifacts/pairs"},
        nll=1.0, dpop=5.0, lr=0.01, eval={"every": 4, "tasks": 0},
    )  # fmt: skip
    last = metrics(bundle)[-1]
    assert last["eval/data/loss"] == pytest.approx(last["validation_loss"], rel=1e-5)


def test_interrupted_preference_stage_resumes_exactly(trained: Path, tmp_path: Path, pairs: Path) -> None:
    bundle = tmp_path / "again"
    inputs = {"data": pairs / "artifacts/pairs"}
    make_bundle(bundle, make_job("preference", inputs=inputs), inputs)

    class Stop(Exception):
        pass

    workspace = Workspace(bundle)
    right = workspace.progress

    def progress(done: int, total: int, *more: object, **figures: float) -> None:
        right(done, total)
        if done == 3:
            raise Stop

    workspace.progress = progress  # type: ignore[method-assign]
    from perilune.bundle.plugin import load_plugin

    with pytest.raises(Stop):
        load_plugin("preference").run(workspace)
    run_in(bundle)
    weights = "artifacts/checkpoints/final/model.safetensors"
    assert (bundle / weights).read_bytes() == (trained / weights).read_bytes()
    assert metrics(bundle) == metrics(trained)


def test_wrong_reference_model_stops_the_run(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perilune.models.checkpoints.loading import new_model
    from perilune.tasks.supervised import preference

    right = preference.add_reference_to_pairs
    other = new_model("tiny", Tokenizer.characters(), seed=99)
    monkeypatch.setattr(
        preference, "add_reference_to_pairs", lambda data, _, *rest: right(data, other, *rest)
    )
    with pytest.raises(WorkFailedError, match="reference differ by"):
        run_task(tmp_path / "b", "preference", inputs={"data": pairs / "artifacts/pairs"})


def test_collapse_alarm_is_raised_once_after_several_steps(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(make_job("preference").model_dump_json())
    (tmp_path / "artifacts").mkdir()
    workspace = Workspace(tmp_path)
    alarm = CollapseAlarm(workspace)
    down = {"collapse": 1.0, "chosen_shift": -0.2}
    for step, figures in enumerate([down, down, {"collapse": 0.0}, *[down] * 8], start=1):
        alarm.observe(step, figures)
        workspace.metric(step, **figures)
    assert alarm.step == 8
    assert CollapseAlarm(workspace).step == 8  # a new attempt finds the recorded alarm
    events = (tmp_path / "runtime" / "events.jsonl").read_text().splitlines()
    assert [json.loads(event)["step"] for event in events] == [8]


def test_chosen_and_rejected_end_with_eos_and_are_never_truncated(pairs: Path) -> None:
    tokenizer = Tokenizer.characters()
    paths = [pairs / "artifacts/pairs"]
    data = PreferenceData.load(paths, RowReader(tokenizer, 1000), 0, validation=0.3)
    texts = {
        side[0]["content"] for record in read_preferences(*paths) for side in (record.chosen, record.rejected)
    }
    for chosen, rejected in (*data.train, *data.validation):
        for episode in (chosen, rejected):
            assert episode.token_ids[-1] == tokenizer.eos_token_id
            assert episode.loss_mask.all()
            assert tokenizer.decode(episode.token_ids) in texts
        assert chosen.prompt_ids.tolist() == rejected.prompt_ids.tolist()
    assert not {a.task_id for a, _ in data.train} & {a.task_id for a, _ in data.validation}
    longest = max(len(episode.prompt_ids) + len(episode.token_ids) for pair in data.train for episode in pair)
    with pytest.raises(RequestError, match=r"preferences.jsonl:\d+: the row has \d+ tokens"):
        PreferenceData.load(paths, RowReader(tokenizer, longest - 1), 0, validation=0.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chosen_score": 0.0}, "does not score above"),
        ({"chosen_score": "good"}, "not a finite number"),
        ({"chosen_score": float("nan")}, "not valid JSON"),
        ({"rejected": [{"role": "user", "content": "x"}]}, "not one message by the assistant"),
        ({"chosen": [{"role": "assistant", "content": "other"}]}, "the row was changed"),
        ({"prompt": "text"}, "not a list of messages"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_damaged_pair_error_names_the_line(
    pairs: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    lines = (pairs / "artifacts/pairs/preferences.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | change)
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    with pytest.raises(RequestError, match=rf"p.jsonl:2: .*{said}"):
        read_preferences(tmp_path / "p.jsonl")


def test_reward_model_learns_and_continues_with_refresh(pairs: Path, tmp_path: Path) -> None:
    inputs = {"data": pairs / "artifacts/pairs"}
    judge = run_task(tmp_path / "judge", "reward_model", inputs=inputs)
    report = summary(judge)
    assert report["accuracy_before"] == 0.0  # a zero head prefers neither answer
    assert report["last"]["loss"] < report["first"]["loss"]
    final = judge / "artifacts/checkpoints/final"
    model, _ = load_reward_model(final)
    assert model.score.weight.abs().max() > 0
    again = run_task(
        tmp_path / "again", "reward_model", refresh="judge", replay="pairs",
        inputs={**inputs, "refresh": final, "replay": pairs / "artifacts/pairs"},
    )  # fmt: skip
    assert summary(again)["accuracy_before"] > 0.5  # training continues from the refreshed model
    assert summary(again)["pairs"] == 2 * report["pairs"]


def test_rl_on_a_reward_model_reports_the_verifier_score_as_gold(pairs: Path, tmp_path: Path) -> None:
    judge = run_task(tmp_path / "judge", "reward_model", inputs={"data": pairs / "artifacts/pairs"})
    inputs = {"reward_model": judge / "artifacts/checkpoints/final"}
    rl_run = run_task(tmp_path / "rl_run", "rl", inputs=inputs, reward_model="judge", environment=ENDS)
    played = episodes(rl_run)
    for row in played.itertuples():
        terms, figures = figures_of(row.reward_terms), figures_of(row.metrics)
        assert row.reward == terms["learned"]
        assert figures["gold"] == terms["verifier"]
        assert terms["learned"] != terms["verifier"]
    lines = metrics(rl_run)
    for line in lines:
        of_step = played[played.step == f"step-{line['step']:06d}"]
        verdicts = [figures_of(row)["gold"] for row in of_step.metrics]
        assert line["gold"] == pytest.approx(sum(verdicts) / len(verdicts))
        assert line["pass_rate"] == pytest.approx(sum(v >= 1 for v in verdicts) / len(verdicts))
        assert line["reward"] == pytest.approx(of_step.reward.mean())
    assert lines[0]["kl_start"] == pytest.approx(0, abs=1e-9)
    assert lines[-1]["kl_start"] > 0
    assert summary(rl_run)["gold"]["first"] == lines[0]["gold"]
    check_kl_from_start(rl_run, lines[-1])
    both = run_task(
        tmp_path / "both", "rl", inputs=inputs, reward_model="judge", verifier_weight=2.0, environment=ENDS
    )
    for row in episodes(both).itertuples():
        terms = figures_of(row.reward_terms)
        assert row.reward == pytest.approx(terms["learned"] + 2 * terms["verifier"])


def check_kl_from_start(rl_run: Path, line: dict[str, Any]) -> None:
    """`kl_start` equals the KL computed from the starting policy's log-probs, bit for bit."""
    files = sorted((rl_run / "artifacts/episodes").glob("step-*.parquet"))
    played = list(read_episodes(files[line["step"] - 1]))
    workspace = Workspace(rl_run)
    start = load_recipe_model(workspace, torch.device("cpu")).decoder
    scores = Engine(start).score(
        [episode.prompt_ids.tolist() for episode in played],
        [episode.token_ids.tolist() for episode in played],
        workspace.job.spec["temperature"],
    )
    by_id = {episode.episode_id: score for episode, score in zip(played, scores, strict=True)}
    assert line["kl_start"] == kl_from_start(played, by_id)


def test_kl_start_of_a_large_model_uses_every_fourth_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl_run = run_task(tmp_path / "rl_run", "rl", steps=1, prompts=5)
    (file,) = (rl_run / "artifacts/episodes").glob("step-*.parquet")
    groups: dict[str, list[Episode]] = {}
    for number, episode in enumerate(read_episodes(file)):  # as if sampled by a distant policy
        far = replace(episode, logprobs=episode.logprobs * (1 + number / 100), metrics={"gold": 1.0})
        groups.setdefault(episode.group_id, []).append(far)
    workspace = Workspace(make_bundle(tmp_path / "bundle", make_job("rl")))
    start = load_recipe_model(Workspace(rl_run), torch.device("cpu")).decoder

    def distance(some: list[list[Episode]]) -> float:
        return GoldWatch(workspace, lambda: start, 1.0, 4096).observe(1, some)["kl_start"]

    played = list(groups.values())
    assert len(played) == 5
    whole, fourth = distance(played), distance([played[0], played[4]])
    monkeypatch.setattr(gold_watch, "LARGE_PARAMETERS", 1000)
    assert distance(played) == fourth != whole


def test_rl_without_reward_model_reports_no_gold(tmp_path: Path) -> None:
    rl_run = run_task(tmp_path / "rl_run", "rl")
    assert "gold" not in metrics(rl_run)[0]
    report = summary(rl_run)
    assert "gold" not in report
    parts = report["length_dynamics"]
    assert parts["behaviour"] + parts["composition"] == pytest.approx(parts["after"] - parts["before"])
    assert {row["difficulty"] for row in parts["table"]} <= {"0", "1"}


def test_policy_checkpoint_is_refused_as_reward_model(pairs: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "artifacts/checkpoints/final", tmp_path / "policy")
    with pytest.raises(RequestError, match=r"score.weight is missing"):
        run_task(tmp_path / "b", "rl", inputs={"reward_model": tmp_path / "policy"}, reward_model="x")
