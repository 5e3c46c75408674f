"""Collecting report data from finished, unfinished, failed and damaged attempts."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from make_experiment import AFTER_RL, AFTER_SFT, UNTRAINED, SyntheticExperiment

from perilune.cli.inspect.report import report
from perilune.data.episode import Episode
from perilune.data.episodes_file import write_episodes
from perilune.errors import RequestError, WorkFailedError
from perilune.files import append_json_line, write_json_lines
from perilune.ui.attempt import Attempt
from perilune.ui.collect import collect_report
from perilune.ui.curves import read_training
from perilune.ui.embedding import embeddable_json
from perilune.ui.episodes import EpisodeSource, collect_episodes
from perilune.ui.evaluations import read_evaluation
from perilune.ui.hardest import find_hardest_tasks
from perilune.ui.hardware import collect_hardware
from perilune.ui.turns import shorten
from perilune.ui.view import ExperimentView, StageView, view_folder


@pytest.fixture
def unfinished(tmp_path: Path) -> Iterator[SyntheticExperiment]:
    made = SyntheticExperiment(tmp_path)
    made.sft(steps=30)
    made.evaluate("after_sft", "sft", AFTER_SFT, 12)
    yield made


def test_collect_reports_the_gain_of_a_finished_experiment(experiment: ExperimentView) -> None:
    data = collect_report(experiment)
    assert data.experiment["state"] == "succeeded"
    assert data.notices == []
    assert [evaluation.label for evaluation in data.evaluations] == ["untrained", "after sft", "after rl"]
    assert data.climb is not None
    assert (data.climb.before, data.climb.after) == ("after_sft", "after_rl")
    assert data.headline.title.startswith("pass@1 rose from")
    change = data.climb.differences["pass@1"]
    assert f"+{100 * change.mean:.1f} points" in data.headline.paragraphs[0]
    assert "12 steps of GRPO" in data.headline.paragraphs[0]
    assert "choosing “scratchpad” more often" in data.headline.paragraphs[1]
    assert [stage.stage for stage in data.library.stages] == ["traces", "base", "after_sft", "rl", "after_rl"]
    assert ("Model", "305,184 parameters", "qwen3, 3 layers of width 96") in data.facts


def test_hardest_tasks_show_failure_reason_and_episode_link(experiment: ExperimentView) -> None:
    data = collect_report(experiment)
    solved = data.evaluations[-1].solved
    rates = sorted(right / n for n, right in solved.values() if right < n)
    assert [task.right / task.samples for task in data.hardest] == rates[:6]
    attempt = Attempt(experiment.stages[-1].attempt_dir)
    (file,) = attempt.episode_files
    hardest = data.hardest[0]
    episodes = [e for e in attempt.episodes(file) if e.opening[-1]["content"] == hardest.prompt]
    wrong = [e.text for e in episodes if e.reward is not None and e.reward < 1]
    cut = sum(e.truncated and e.reward == 0 for e in episodes)
    assert hardest.times == max(map(wrong.count, wrong)) == wrong.count(hardest.answer)
    assert f"{len(wrong) - cut} wrong" in hardest.why
    assert {episode.expected for episode in episodes} == {hardest.expected}
    assert sum(map(int, hardest.prompt.rstrip("=").split("+"))) == int(hardest.expected)
    stage, part, episode = map(unquote, hardest.link.split("/")[1:])
    assert (stage, part) == ("after_rl", "samples")
    assert next(e.text for e in episodes if e.episode_id == episode) == hardest.answer


def test_headline_reports_a_decrease_as_fell(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.evaluate("before", "sft", AFTER_RL, 40)
    made.rl(steps=3, prompts=2)
    made.evaluate("after", "rl", AFTER_SFT, 40)
    assert collect_report(made.view()).headline.title.startswith("pass@1 fell from")


def test_waiting_stage_takes_its_parent_from_the_recipe(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.sft(steps=3)
    view = made.view()
    waiting = StageView("after_sft", "evaluate", "", "waiting", None)
    declared = {"after_sft": {"checkpoint": "sft", "tasks": 8}}
    last = collect_report(replace(view, stages=(*view.stages, waiting), declared=declared)).stages[-1]
    assert (last.parent, last.uses, last.state) == ("sft", [], "waiting")


def test_stages_link_to_their_parent_checkpoint(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.sft(steps=3)
    made.evaluate("after_sft", "sft", AFTER_SFT, 30)
    made.rl(steps=3, prompts=2)
    made.evaluate("after_rl", "rl", AFTER_RL, 30)
    made.evaluate("again", "sft", AFTER_SFT, 30)
    data = collect_report(made.view())
    assert [(stage.name, stage.parent, stage.uses) for stage in data.stages] == [
        ("sft", "", []),
        ("after_sft", "sft", []),
        ("rl", "sft", []),
        ("after_rl", "rl", []),
        ("again", "sft", []),
    ]
    assert [(pair.before, pair.after) for pair in data.comparisons] == [("after_sft", "after_rl")]
    labels = [evaluation.label for evaluation in data.evaluations]
    assert labels == ["after sft (after_sft)", "after rl", "after sft (again)"]


def test_headline_claims_no_change_between_equal_policies(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.evaluate("before", "sft", AFTER_SFT, 30)
    made.rl(steps=3, prompts=2)
    made.evaluate("after", "rl", AFTER_SFT, 30)
    data = collect_report(made.view())
    assert data.climb is not None
    assert "rose" not in data.headline.title
    assert "fell" not in data.headline.title


def test_headline_without_evaluations_describes_the_last_rl_stage(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.rl(steps=1, prompts=2)
    made.rl(steps=4, prompts=2, name="again")
    report = collect_report(made.view())
    assert report.headline.paragraphs[0].startswith("4 steps of GRPO")
    assert [training.description for training in report.training] == ["1 step of GRPO.", "4 steps of GRPO."]


def test_rejection_sampling_is_reported_as_collected_traces(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.collect(40, task="rejection_sampling")
    for embed in (True, False):
        data = collect_report(made.view(), embed=embed)
        assert [listed.task for listed in data.library.stages] == ["collect"]  # its parts are no steps
    assert data.headline.paragraphs == ("Stage traces made 40 verified traces and rejected 0 candidates.",)
    assert ("Traces", "40 kept, 0 rejected") in data.stages[0].facts


def test_collect_shows_finished_steps_of_an_active_run(unfinished: SyntheticExperiment) -> None:
    root = unfinished.rl(steps=10, prompts=2, until=4)
    with (root / "artifacts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # an incomplete line
    data = collect_report(unfinished.view())
    assert data.experiment["state"] == "active"
    assert [(notice.kind, notice.text) for notice in data.notices] == [
        ("active", "4 of 10 steps were done when this was written.")
    ]
    rl = next(training for training in data.training if training.stage == "rl")
    assert rl.columns["step"] == [1, 2, 3, 4]
    assert rl.description == "4 of 10 steps of GRPO."


def test_headline_without_results_says_none_yet(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.collect(40)
    assert collect_report(made.view()).headline.title == "No checkpoint was evaluated"
    made.begin("base", "evaluate", {"checkpoint": "model"})
    data = collect_report(made.view())
    assert data.headline.title == "No results yet"
    assert [(health.stage, health.status) for health in data.health] == [("base", "healthy")]
    made.rl(steps=10, prompts=2, until=4)
    assert "held-out tasks yet" in collect_report(made.view()).headline.paragraphs[0]


def test_evaluation_warning_becomes_a_notice(unfinished: SyntheticExperiment) -> None:
    root = unfinished.evaluate("before", "sft", AFTER_SFT, 4)
    path = root / "artifacts" / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "warnings": ["only 1.0% have the form"]}))
    (notice,) = [notice for notice in collect_report(unfinished.view()).notices if notice.kind == "warning"]
    assert (notice.title, notice.text) == ("Stage before:", "only 1.0% have the form")


def test_failed_run_shows_its_cause_and_log_tail(unfinished: SyntheticExperiment) -> None:
    root = unfinished.rl(steps=10, prompts=2, until=2)
    unfinished.fail(root, "95% of groups had equal rewards for 20 steps\n  try: easier tasks", 7.0)
    data = collect_report(unfinished.view())
    assert data.experiment["state"] == "failed"
    (notice,) = data.notices
    assert notice.kind == "failed"
    assert "95% of groups had equal rewards for 20 steps. The report" in notice.text
    assert data.health[-1].findings[0].remedy == "easier tasks"
    assert "rl says line 7" in notice.log


def test_collect_of_empty_attempt_has_no_results(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.begin("rl", "rl", {"algorithm": "grpo", "samples": 8, "steps": 5})
    (root / "artifacts" / "precheck.json").unlink()
    data = collect_report(made.view())
    assert data.headline.title == "No results yet"
    assert data.training == []
    waiting = replace(made.stages[0], state="waiting", attempt_dir=None)
    later = collect_report(ExperimentView("e", 0, "", (waiting,)))
    assert later.notices[0].title == "Not started: rl."


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "episodes/step-000002.parquet"])
def test_collect_skips_damaged_file_and_names_it_in_a_notice(
    unfinished: SyntheticExperiment, name: str
) -> None:
    root = unfinished.rl(steps=3, prompts=2)
    (root / "artifacts" / name).write_bytes(b"PAR1 nonsense\n{}\n")
    notices = [notice for notice in collect_report(unfinished.view()).notices if notice.kind == "damage"]
    assert len(notices) == 1
    assert Path(name).name in notices[0].text


TRAINING_WITH_WRONG_TYPES: dict[str, object] = {
    "implicit_objective": [1.0],
    "kind": "calibration",  # which has further keys
    "length_dynamics": {"before": "short", "table": []},
    "forgetting": {"text": 7},
    "gold": {"recommended_stop": 3, "at_recommended_stop": "high"},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("correct_per_task", [7]),
        ("strategies", {"direct": None}),
        ("samples", "many"),
        ("pass@1", {"mean": 0.5, "low": "x", "high": 1.0}),
        ("truncated", "few"),
        ("warnings", [7]),
        *TRAINING_WITH_WRONG_TYPES.items(),
    ],
)
def test_summary_with_a_wrong_type_is_left_out_and_named(
    unfinished: SyntheticExperiment, key: str, value: object
) -> None:
    root = unfinished.rl(steps=3, prompts=2) if key in TRAINING_WITH_WRONG_TYPES else None
    attempt = Attempt(root or unfinished.view().stages[-1].attempt_dir)
    assert attempt.root is not None
    path = attempt.root / "artifacts" / "summary.json"
    path.write_text(json.dumps({**attempt.summary, key: value}))
    data = collect_report(unfinished.view())
    (notice,) = [notice for notice in data.notices if notice.kind == "damage"]
    assert "summary.json: has a value of a wrong type" in notice.text
    assert len(data.evaluations) == (1 if root else 0)


def test_view_folder_reads_stages_without_a_control_plane(experiment: ExperimentView) -> None:
    home = experiment.stages[0].attempt_dir.parents[3]  # type: ignore[union-attr]
    view = view_folder(home)
    assert [(stage.name, stage.state) for stage in view.stages] == [
        (stage.name, "succeeded") for stage in experiment.stages
    ]
    assert view_folder(experiment.stages[4].attempt_dir).stages[0].name == "rl"  # type: ignore[arg-type]


def test_view_folder_uses_the_newest_attempt(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=3, prompts=2, until=1)
    shutil.copytree(root, root.with_name("10"))
    shutil.copytree(root, root.with_name("2"))
    (stage,) = view_folder(tmp_path).stages
    assert stage.attempt_dir == root.with_name("10")
    assert stage.attempts == 3


def test_report_names_a_folder_that_is_deleted_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = SyntheticExperiment(tmp_path).rl(steps=3, prompts=2, until=1)
    monkeypatch.setattr("perilune.ui.view._has_begun", lambda folder: shutil.rmtree(folder) is None)
    with pytest.raises(WorkFailedError, match=f"{root} was deleted while") as failed:
        report([str(tmp_path)], tmp_path / "report.html")
    assert failed.value.remedy == "run the command again"


def test_view_folder_without_attempts_raises_request_error(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "job.json").write_text("{}")
    with pytest.raises(RequestError, match="no attempt directory"):
        view_folder(tmp_path)


# ------------------------------------------------------------------------------------------- episodes
def test_collect_episodes_selects_whole_groups_deterministically(experiment: ExperimentView) -> None:
    rl = experiment.stages[4]
    small, again = (
        collect_episodes([EpisodeSource("rl", "rl", Attempt(rl.attempt_dir))], budget=60_000)
        for _ in range(2)
    )
    sizes = {len(group["episodes"]) for part in small.sampled for group in json.loads(part.json)}
    assert sizes == {8}
    assert sum(len(part.json) for part in small.sampled) <= 60_000
    assert 0 < sum(part.embedded for part in small.sampled) < sum(part.total for part in small.sampled)
    assert [part.json for part in small.sampled] == [part.json for part in again.sampled]


def test_group_over_budget_keeps_text_without_tokens(experiment: ExperimentView) -> None:
    source = EpisodeSource("rl", "rl", Attempt(experiment.stages[4].attempt_dir))
    whole = collect_episodes([source])
    group = min(len(json.dumps(group, separators=(",", ":"))) for group in json.loads(whole.sampled[0].json))
    library = collect_episodes([source], budget=3 * (group - 1))
    episodes = [e for part in library.sampled for group in json.loads(part.json) for e in group["episodes"]]
    assert any(e["tokens"] is None for e in episodes)
    assert all(e["text"] for e in episodes)
    assert [part.step for part in library.sampled] == [1, 7, 12]
    assert library.steps_left_out == 9


def test_collected_advantages_match_the_recorded_rewards(experiment: ExperimentView) -> None:
    library = collect_episodes([EpisodeSource("rl", "rl", Attempt(experiment.stages[4].attempt_dir))])
    for part in library.sampled:
        for group in json.loads(part.json):
            scored = [e for e in group["episodes"] if e["reward"] is not None]
            rewards = np.array([e["reward"] for e in scored])
            advantages = np.array([e["advantage"] for e in scored])
            assert group["dead"] == (rewards.std() == 0)
            if not group["dead"]:
                expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
                np.testing.assert_allclose(advantages, expected, rtol=1e-4)


# --------------------------------------------------------------------------------------------- curves
def test_training_of_thins_long_curves_and_reports_kept_steps(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.begin("sft", "sft", {"steps": 9000})
    lines = "".join(f'{{"step": {step}, "loss": {1 / step}}}\n' for step in range(1, 9001))
    (root / "artifacts" / "metrics.jsonl").write_text(lines)
    training = read_training("sft", "sft", "", Attempt(root))
    assert training is not None
    assert (training.steps_total, training.steps_kept) == (9000, 2000)
    assert (training.columns["step"][0], training.columns["step"][-1]) == (1, 9000)


def test_thinned_curves_keep_evaluations(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.begin("rl", "rl", {"steps": 9000})
    rows: list[dict[str, float]] = [{"step": step, "reward": 0.5} for step in range(1, 9001)]
    for row in rows[99::100]:
        row["eval/heldout/pass@1"] = 0.5
    write_json_lines(root / "artifacts" / "metrics.jsonl", rows)
    training = read_training("rl", "rl", "", Attempt(root))
    assert training is not None and training.steps_kept <= 2000
    assert training.columns["eval/heldout/pass@1"].count(0.5) == 90


def test_headline_needs_two_evaluations_during_training(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    metrics = made.begin("rl", "rl", {"checkpoint": "model", "steps": 9}) / "artifacts" / "metrics.jsonl"
    keys = ("eval/heldout/pass@1", "eval/heldout/pass@1/low", "eval/heldout/pass@1/high")
    append_json_line(metrics, {"step": 0, **dict(zip(keys, (0.3, 0.2, 0.4), strict=True))})
    assert collect_report(made.view()).headline.title == "No results yet"
    append_json_line(metrics, {"step": 4, **dict(zip(keys, (0.5, 0.4, 0.6), strict=True))})
    headline = collect_report(made.view()).headline
    assert headline.title == "pass@1 on heldout tasks went from 30.0% to 50.0%"
    assert headline.paragraphs[0].endswith("20.0% to 40.0% before training, 40.0% to 60.0% so far.")


def test_unscored_answer_is_no_wrong_answer_of_a_hard_task(tmp_path: Path) -> None:
    root = SyntheticExperiment(tmp_path).evaluate("base", "model", AFTER_SFT, 1)
    attempt = Attempt(root)
    (path,) = attempt.episode_files
    same = ({"role": "user", "content": "1+1="}, {"role": "assistant", "content": "3"})
    episodes = [replace(episode, messages=same, reward=0.0) for episode in attempt.episodes(path)]
    unscored = [replace(episode, reward=None, failure="timeout") for episode in episodes[:5]]
    write_episodes(path, [*unscored, *episodes[5:]])
    evaluation = read_evaluation("base", "", attempt.summary, {})
    assert evaluation is not None
    (task,) = find_hardest_tasks([(replace(evaluation, solved={episodes[0].task_id: (3, 0)}), attempt)])
    assert (task.times, task.samples, task.why) == (3, 3, "5 not scored, 3 wrong")


def test_untrained_model_without_vocabulary_still_shows_tokens(tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.evaluate("base", "model", UNTRAINED, 6)
    (stage,) = collect_episodes([EpisodeSource("base", "evaluate", Attempt(root))]).stages
    assert stage.vocabulary == 0
    assert json.loads(stage.sets[0].json)[0]["episodes"][0]["tokens"]


def test_hardware_series_leave_a_gap_between_stages(experiment: ExperimentView) -> None:
    hardware = collect_hardware([(stage.name, Attempt(stage.attempt_dir)) for stage in experiment.stages])
    assert hardware is not None
    assert [figure["key"] for figure in hardware.figures] == ["cpu", "memory"]
    bands, machine = hardware.figures[0]["bands"], hardware.figures[0]["series"][-1]
    seconds = machine["x"]
    assert seconds == sorted(seconds)
    for band, later in pairwise(bands):
        assert band["end"] == later["begin"]
        assert machine["y"][seconds.index(pytest.approx(band["end"]))] is None


def test_headline_states_pass_at_8_before_training(experiment: ExperimentView) -> None:
    data = collect_report(experiment)
    paragraph = data.headline.paragraphs[1]
    before, after = data.evaluations[1:]
    assert before.measures["pass@8"][0] >= after.measures["pass@1"][0]
    assert f"pass@8 was {100 * before.measures['pass@8'][0]:.1f}% before training" in paragraph


def test_run_seconds_sum_earlier_attempts(tmp_path: Path) -> None:
    for number, seconds in ((1, 40.0), (2, 5.0), (3, 900.0)):
        runtime = tmp_path / str(number) / "runtime"
        runtime.mkdir(parents=True)
        (runtime / "result.json").write_text(json.dumps({"seconds": seconds}))
    assert Attempt(tmp_path / "2").run_seconds == 45.0
    assert Attempt(tmp_path / "2").seconds == 5.0
    for damaged in ("[]", "null", "1" * 400):
        (tmp_path / "2" / "runtime" / "result.json").write_text(f'{{"seconds": {damaged}}}')
        assert Attempt(tmp_path / "2").run_seconds == 40.0


def test_curves_leave_out_integers_beyond_floats(tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    rows = [{"step": 1, "reward": 10**400, "learning": 2}, {"step": 2, "reward": 1, "learning": -(10**400)}]
    for name in ("metrics", "timings"):
        (artifacts / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (artifacts / "hardware.jsonl").write_text(json.dumps({"time": 10**400, "cpu": 10**400}) + "\n")
    attempt = Attempt(tmp_path)
    assert attempt.metrics["reward"] == [None, 1] and attempt.timings["learning"] == [2, None]
    assert read_training("rl", "rl", "", attempt) is not None
    assert collect_hardware([("rl", attempt)]) is None


def test_very_long_answer_is_shortened_and_hides_no_episode(experiment: ExperimentView) -> None:
    stage = next(stage for stage in experiment.stages if stage.name == "rl")
    attempt = Attempt(stage.attempt_dir)
    first = attempt.episode_files[0]
    episodes = attempt.episodes(first)
    long = replace(
        episodes[1],
        messages=(*episodes[1].messages[:-1], {"role": "assistant", "content": "x" * 4_800_000}),
    )
    whole = collect_episodes([EpisodeSource("rl", "rl", attempt)]).stages[0].sets[0]

    class WithALongOne(Attempt):
        def episodes(self, path: Path) -> list[Episode]:
            read = attempt.episodes(path)
            return [read[0], long, *read[2:]] if path == first else read

    library = collect_episodes([EpisodeSource("rl", "rl", WithALongOne(attempt.root))])
    part = library.stages[0].sets[0]
    assert (part.total, part.embedded) == (whole.total, whole.embedded) == (len(episodes), len(episodes))
    assert "4,780,000 characters omitted" in part.json and len(part.json) < len(whole.json) + 100_000


def test_shortened_omits_the_middle_of_a_text() -> None:
    assert shorten("abcdefgh", 8) == "abcdefgh"
    assert shorten("abcdefghij", 8) == "abcdef\n[… 2 characters omitted …]\nij"


def test_embeddable_json_replaces_lone_surrogates() -> None:
    text = embeddable_json({"said": "a\ud800b", "key\udfff": "\U0001f600"})
    assert json.loads(text.encode().decode()) == {"said": "a\ufffdb", "key\ufffd": "\U0001f600"}
