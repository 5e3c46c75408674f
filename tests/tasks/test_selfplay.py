"""The selfplay stage: opponents, matches, publishing, and exact resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from task_cases import DUEL, episodes, make_bundle, make_job, metrics, run_in, run_task, summary

from perilune.bundle.compare import compare_artifacts
from perilune.data.records import TraceRecord, write_records
from perilune.engine.engine import Engine
from perilune.errors import RequestError, WorkFailedError
from perilune.execution.placements.local import restore_outputs
from perilune.files import sha256_file
from perilune.learn import checkpoints
from perilune.models.checkpoints.checksum import checksum
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.tasks.checks.collapse import CollapseWatch
from perilune.tasks.rl.metrics import StepRecorder
from perilune.tasks.rl.update import PolicyUpdater
from perilune.tasks.selfplay.league import League
from perilune.tasks.selfplay.matches import Standings
from perilune.tasks.selfplay.snapshots import Snapshots
from perilune.tasks.selfplay.spec import SelfPlaySpec
from perilune.tasks.stage.training import StepReport

FINAL = "artifacts/checkpoints/final"
LEAGUE = "artifacts/checkpoints/league"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that writes a random digit."""
    folder = tmp_path_factory.mktemp("start")
    rows = [
        TraceRecord(
            [{"role": "user", "content": "a digit?"}, {"role": "assistant", "content": str(number % 10)}],
            environment="duel", task_id=str(number), score=1.0, source="test", seed=0,
        )
        for number in range(40)
    ]  # fmt: skip
    write_records(folder / "traces/records.jsonl", rows)
    bundle = run_task(
        folder / "b", "sft", environment=DUEL, inputs={"data": folder / "traces"},
        steps=10, batch_size=10, lr=4e-3, save_every=100,
    )  # fmt: skip
    return bundle / FINAL


def options(**more: Any) -> dict[str, Any]:
    league = {"every": 2, "games": 24, "share": 0.5} | more.pop("league", {})
    return {"environment": DUEL, "steps": 6, "prompts": 6, "samples": 6, "lr": 3e-3, "save_every": 3,
            "max_tokens": 4, "temperature": 1.0, "league": league, **more}  # fmt: skip


@pytest.fixture(scope="module")
def played(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A selfplay run without interruption."""
    folder = tmp_path_factory.mktemp("played") / "b"
    return run_task(folder, "selfplay", inputs={"checkpoint": start}, **options())


def test_selfplay_improves_and_reports_ratings(played: Path) -> None:
    league, lines = summary(played)["league"], metrics(played)
    assert [line["step"] for line in league["judgements"]] == [0, 2, 4, 6]
    first, *_, last = league["judgements"]
    assert last["against/step 0/low"] > 0 and last["against/random/low"] > 0
    assert last["elo"] > first["elo/high"] - 50 and league["champion"] == 6 and not league["collapsed"]
    assert league["ratings"]["random"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert all(match["won"] + match["drawn"] + match["lost"] == 24 for match in league["matches"])
    assert [line["step"] for line in lines if "elo" in line] == [2, 4, 6]
    assert lines[-1]["elo"] == last["elo"] and {"openings", "illegal", "drawn", "met"} <= lines[0].keys()
    assert {line["met"] for line in lines[:2]} == {0.0}


def test_league_members_play_their_share_of_tasks_without_training(played: Path) -> None:
    rows = episodes(played)
    groups = rows.groupby("group_id").size()
    tasks = {name.removesuffix("/p1") for name in groups.index}
    assert len(tasks) == 36 and set(groups) == {6}
    with_league = 2 * len(tasks) - len(groups)  # only one seat of these tasks has a training group
    assert 8 <= with_league <= 28
    newest = rows.groupby("step")["policy_version"].apply(lambda column: {int(v.max()) for v in column})
    assert list(newest) == [{version} for version in range(6)]


def test_selfplay_trains_turns_without_history(tmp_path: Path) -> None:
    about = {"id": "open_spiel", "game": "liars_dice", "config": {"dice_sides": 3}, "history": False}
    traces = run_task(
        tmp_path / "traces", "collect", environment=about, teacher="open_spiel", traces=20,
        strategies={"random": 1.0}, options={"policy": "random"},
    )  # fmt: skip
    model = run_task(
        tmp_path / "sft", "sft", environment=about, inputs={"data": traces / "artifacts/traces"},
        steps=25, batch_size=20, lr=4e-3,
    )  # fmt: skip
    folder = run_task(
        tmp_path / "b", "selfplay", inputs={"checkpoint": model / FINAL}, steps=1,
        environment=about | {"random_moves": 1},  # so the second player begins
        prompts=8, samples=6, max_tokens=8, train_sub_agents=True, league={"games": 4, "share": 0.0},
    )  # fmt: skip
    rows = episodes(folder)
    players = {name.partition("/")[2].partition("/")[2] for name in rows["group_id"]}
    assert {"", "agents", "p1", "p1/agents"} <= players
    assert 1 < metrics(folder)[0]["turns"] < 2
    assert [line["step"] for line in summary(folder)["league"]["judgements"]] == [0, 1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(checkpoints.read(folder, ("weights",))[0]["weights"])


def test_league_opponents_use_their_frozen_weights(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record the weights of the league's engine whenever it samples."""
    seen: list[tuple[int, dict[str, torch.Tensor]]] = []
    sample, prepare = Engine.sample, League.prepare
    leagues: list[League] = []

    def remembers(self: League, step: int) -> None:
        leagues[:] = [self]
        prepare(self, step)

    def watched(self: Engine, *arguments: Any, **more: Any) -> Any:
        if leagues and self is leagues[0].engine:
            held = {name: tensor.clone() for name, tensor in self._source.named_parameters()}
            seen.append((self.version, held))
        return sample(self, *arguments, **more)

    monkeypatch.setattr(League, "prepare", remembers)
    monkeypatch.setattr(Engine, "sample", watched)
    bundle = run_task(tmp_path / "b", "selfplay", inputs={"checkpoint": start}, **options(steps=4))
    frozen = {step: weights(bundle / LEAGUE / f"step-{step:06d}") for step in (0, 2, 4)}
    assert checksum(frozen[0]) != checksum(frozen[2])
    began = dict(load_checkpoint(start, torch.device("cpu"))[0].named_parameters())
    assert all(torch.equal(frozen[0][name], began[name]) for name in began)
    assert {version for version, _ in seen} == {0, 2}
    for version, held in seen:
        assert all(torch.equal(held[name], tensor) for name, tensor in frozen[version].items())


@pytest.mark.thorough
def test_killed_selfplay_resumes_exactly_with_its_league(
    played: Path, start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the fifth step, when no checkpoint has the judgement of step 4."""
    job, inputs = make_job("selfplay", inputs={"checkpoint": start}, **options()), {"checkpoint": start}
    broken = make_bundle(tmp_path / "one", job, inputs)
    record = StepRecorder.record

    def dies(self: StepRecorder, step: int, *arguments: Any) -> StepReport:
        if step == 5:
            raise KeyboardInterrupt
        return record(self, step, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StepRecorder, "record", dies)
        run_in(broken)
    again = make_bundle(tmp_path / "two", job, inputs)
    restore_outputs(broken / "artifacts", again / "artifacts")
    run_in(again)
    assert compare_artifacts(played, again) == []
    assert metrics(played) == metrics(again) and summary(played)["league"] == summary(again)["league"]
    for path in sorted((played / "artifacts/checkpoints").rglob("*.safetensors")):
        assert sha256_file(path) == sha256_file(again / path.relative_to(played)), path


def test_modified_snapshot_is_refused(played: Path, start: Path, tmp_path: Path) -> None:
    decoder = load_checkpoint(start, torch.device("cpu"))[0]
    snapshots = Snapshots(tmp_path / "league", decoder, Engine(decoder, slots=2))
    digest = snapshots.save(3, decoder)
    assert snapshots.load(3, digest).version == 3
    with pytest.raises(WorkFailedError, match="the snapshot of step 3"):
        Snapshots(tmp_path / "league", decoder, Engine(decoder, slots=2)).load(3, "another")
    file = tmp_path / "league/step-000003/weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(RequestError, match=r"weights\.safetensors is missing or differs"):
        Snapshots(tmp_path / "league", decoder, Engine(decoder, slots=2)).load(3, digest)


def test_collapsed_policy_is_not_published(start: Path, tmp_path: Path) -> None:
    """A destructive learning rate: the collapse is reported, and the first policy stays champion."""
    harmful = options(lr=0.3, warmup=0, steps=10, keep={"optimizer": True})
    bundle = run_task(tmp_path / "b", "selfplay", inputs={"checkpoint": start}, **harmful)
    league = summary(bundle)["league"]
    assert league["champion"] == 0 and league["collapsed"], league["judgements"]
    assert {alarm["name"] for alarm in league["alarms"] if alarm["kind"] == "collapse"} & {
        "weaker",
        "illegal",
        "unfinished",
    }
    published = load_file(bundle / FINAL / "model.safetensors")
    began = load_file(start / "model.safetensors")
    assert all(torch.equal(published[name], began[name]) for name in began)
    last = load_file(bundle / FINAL / "optimizer/weights.safetensors")
    assert any(not torch.equal(last[name], tensor) for name, tensor in published.items() if name in last)


def table(*judged: dict[str, Any]) -> Standings:
    standings = Standings({}, ("random",), seed=0)
    for step, scores in enumerate(judged):
        returns = {
            name: dict(enumerate(values)) for name, values in scores.items() if not isinstance(values, float)
        }
        exact = {name: value for name, value in scores.items() if isinstance(value, float)}
        standings.add(step, {n: {str(k): v for k, v in r.items()} for n, r in returns.items()}, exact)
    return standings


EVEN, WON, LOST = [1.0, -1.0] * 20, [1.0] * 30 + [-1.0] * 10, [1.0] * 10 + [-1.0] * 30


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        ({"random": EVEN}, {"random": EVEN, "step 0": EVEN}, []),
        ({"random": EVEN}, {"random": WON, "step 0": WON}, []),
        ({"random": EVEN}, {"random": EVEN, "step 0": LOST}, ["loses to step 0"]),
        ({"random": WON}, {"random": EVEN, "step 0": EVEN}, ["lower return against random than step 0"]),
        (
            {"random": EVEN, "exploitability": 0.2, "illegal_mass": 0.0},
            {"random": WON, "step 0": WON, "exploitability": 0.3, "illegal_mass": 0.0},
            ["exploitability was 0.200 at step 0"],
        ),
        (
            {"random": EVEN, "exploitability": 0.2, "illegal_mass": 0.0},
            {"random": WON, "step 0": LOST, "exploitability": 0.1, "illegal_mass": 0.0},
            [],
        ),
        (
            {"random": EVEN, "exploitability": 0.2, "illegal_mass": 0.0},
            {"random": WON, "step 0": WON, "exploitability": 0.1, "illegal_mass": 0.2},
            ["illegal mass was 0.000 at step 0"],
        ),
    ],
)
def test_gate_reports_reasons_to_reject(first: dict[str, Any], then: dict[str, Any], why: list[str]) -> None:
    assert table(first, then).reasons_to_reject(1, 0) == why


def test_prioritized_choice_prefers_hard_opponents(played: Path) -> None:
    chosen = {choice: drawn(choice) for choice in ("uniform", "prioritised")}
    assert 60 < chosen["uniform"].count(0) < 140
    assert chosen["prioritised"].count(0) > 170


def drawn(choice: str) -> list[int]:
    league = object.__new__(League)
    members = {"points": {"0": 0.1, "2": 0.9}, "members": {"0": "", "2": ""}, "champion": 2}
    parts: dict[str, Any] = {
        "_settings": type("", (), {"choice": choice, "size": 8}),
        "_workspace": type("", (), {"job": type("", (), {"seed": 1})}),
        "_learner": type("", (), {"memory": {"league": members}}),
    }
    for name, value in parts.items():
        setattr(league, name, value)
    return [league._draw(step) for step in range(200)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"environment": {**DUEL, "opponent": "random"}}, r"environment: .*one player"),
        ({"league": {"against": ["nobody"]}}, r"league.against: the environment has no player .nobody."),
    ],
)
def test_selfplay_without_opponents_is_refused(change: dict[str, Any], message: str) -> None:
    from perilune.tasks.selfplay.stage import plugin

    with pytest.raises(RequestError, match=message):
        plugin.plan(make_job("selfplay", **options(**change)))


@pytest.mark.thorough
def test_magnet_is_the_newest_member_before_and_after_resume(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, str]] = []
    make = PolicyUpdater._update

    def watched(self: PolicyUpdater, groups: Any, step: int) -> Any:
        assert self._reference is not None
        seen.append((step, checksum(dict(self._reference.named_parameters()))))
        if step == killed_at:
            raise KeyboardInterrupt
        return make(self, groups, step)

    monkeypatch.setattr(PolicyUpdater, "_update", watched)
    settings = options(kl=0.2, kl_estimator="k2", league={"magnet": "newest"}, steps=5)
    job, inputs = make_job("selfplay", inputs={"checkpoint": start}, **settings), {"checkpoint": start}
    killed_at, whole = -1, make_bundle(tmp_path / "whole", job, inputs)
    run_in(whole)
    members = {step: checksum(weights(whole / LEAGUE / f"step-{step:06d}")) for step in (0, 2, 4)}
    assert len(set(members.values())) == 3
    assert seen == [(step, members[step // 2 * 2]) for step in range(5)]
    killed_at, broken = 3, make_bundle(tmp_path / "broken", job, inputs)
    with pytest.raises(KeyboardInterrupt):
        run_in(broken)
    killed_at, again = -1, make_bundle(tmp_path / "again", job, inputs)
    restore_outputs(broken / "artifacts", again / "artifacts")
    run_in(again)
    assert compare_artifacts(whole, again) == []


@pytest.mark.parametrize(
    ("more", "what"), [({}, "kl is 0"), ({"kl": 0.1, "lora": {"rank": 2}}, "neither with lora")]
)
def test_magnet_without_a_movable_reference_is_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        SelfPlaySpec.model_validate({"checkpoint": "sft", "league": {"magnet": "newest"}, **more})


def test_best_checkpoint_by_a_metric_is_refused() -> None:
    """The stage would write the champion's weights in its place."""
    with pytest.raises(ValueError, match="outputs the champion"):
        SelfPlaySpec.model_validate({"checkpoint": "sft", "keep": {"best": "reward"}})


def test_stronger_opponents_are_no_collapse_of_the_reward(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward of an improving policy falls when its opponents are as good as it is."""
    monkeypatch.setattr(
        CollapseWatch, "observe", lambda watch, *_: setattr(watch, "alarm", True) or "collapsed"
    )
    played = run_task(
        tmp_path / "b", "selfplay", inputs={"checkpoint": start}, **options(steps=2, prompts=2, samples=2)
    )
    assert not any(line["collapse_alarm"] for line in metrics(played))
