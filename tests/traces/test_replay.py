"""A replayed cassette equals its recording, and every change of the harness shows as a difference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from trace_cases import NAME, TOKENIZER, calculations, draft, played, replay, suite_of, tasks, tokenizer_of

from perilune.environments.core.episode_totals import EpisodeTotals
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.worker import RolloutWorker
from perilune.traces.cassette import Cassette
from perilune.traces.causes import choose_cassettes, cluster_cassettes, describe_cause, is_held_out
from perilune.traces.gate import run_suite
from perilune.traces.oracle import Difference, make_expectation
from perilune.traces.replay import Replay, Replayer
from perilune.traces.suite import Case, Suite, write_suite


@pytest.fixture(scope="module")
def tapes() -> list[Cassette]:
    return calculations(4)


SKIPPED = """
from perilune.environments.core.multi_turn import MultiTurn, ask, end_episode
from perilune.environments.core.protocol import Task


class Skipped(MultiTurn):
    id, max_turns, cut_off = "skipped", 2, ""

    def __init__(self, spec):
        pass

    def tasks(self, split, seed):
        yield Task("0" * 32, ({"role": "user", "content": "go"},), {})

    def play(self, task, rng):
        first = yield ask()
        second = yield ask(f"you said {first!r}")
        yield end_episode(float(first != ""))
"""


def rescore(cassettes: list[Cassette]) -> list[Replay]:
    with Replayer(tokenizer_of) as replayer:
        return replayer.rescore(cassettes)


def found(
    cassettes: list[Cassette], play: Callable[[list[Cassette]], list[Replay]] = replay
) -> list[list[Difference]]:
    return [
        again.differences(tuple(map(make_expectation, cassette.tracks)))
        for cassette, again in zip(cassettes, play(cassettes), strict=True)
    ]


def kinds(differences: list[list[Difference]]) -> set[str]:
    return {difference.kind for part in differences for difference in part}


def test_cassettes_record_turns_rewards_and_causes(tapes: list[Cassette]) -> None:
    assert [tape.tracks[0].verdict.reward for tape in tapes] == [1.0, 0.0, 0.0, 1.0]
    right, _, malformed, guess = tapes
    assert [turn.messages for turn in right.tracks[0].turns][-1] == ()
    assert right.tracks[0].turns[0].messages[0]["content"].startswith("=")
    assert malformed.tracks[0].turns[-2].messages == ({"role": "tool", "content": "=?\n"},)
    assert guess.order == ("0",) and describe_cause(guess) == "guess, full reward"
    assert malformed.tokens == len(malformed.tracks[0].prompt) + sum(
        len(turn.tokens) + len(turn.seen) for turn in malformed.tracks[0].turns
    )


def test_unchanged_replay_has_no_differences(tapes: list[Cassette]) -> None:
    assert not kinds(found(tapes)) and not kinds(found(tapes, rescore))
    assert not kinds(found(tapes[::-1]))


@pytest.mark.parametrize("is_cut", [True, False])
def test_rescored_episode_keeps_an_earlier_turn_cut_off(is_cut: bool) -> None:
    section = {"id": "skipped.py:Skipped", "source": SKIPPED}
    (task,) = tasks(section, 1)
    tape = draft(section, task, 0, ["a long move", "b"])
    first, last = tape.tracks[0].turns
    turns = (first.model_copy(update={"finished": not is_cut}), last)
    track = tape.tracks[0].model_copy(update={"turns": turns})
    (recorded,) = played([tape.model_copy(update={"tracks": (track,)})])
    assert recorded.tracks[0].verdict.reward == float(not is_cut)
    (again,) = rescore([recorded])
    assert again.tracks[0].verdict.reward == float(not is_cut)


def test_changed_cassette_shows_differences(tapes: list[Cassette]) -> None:
    def changed(one: Cassette, **verdict: Any) -> Cassette:
        track = one.tracks[0]
        other = track.model_copy(update={"verdict": track.verdict.model_copy(update=verdict)})
        return one.model_copy(update={"tracks": (other,)})

    tape = changed(tapes[0], reward=0.5, terms={"right": 1.0})
    assert kinds(found([tape])) == {"reward", "term"} == kinds(found([tape], rescore))
    assert kinds(found([changed(tapes[0], finish_reason="length")])) == {"finish"}
    assert kinds(found([changed(tapes[0], metrics={})])) == {"metric"}
    shorter = tapes[0].tracks[0].model_copy(update={"turns": tapes[0].tracks[0].turns[:-1]})
    assert {"turns", "failure"} <= kinds(
        [
            again.differences(tuple(map(make_expectation, tapes[0].tracks)))
            for again in replay([tapes[0].model_copy(update={"tracks": (shorter,)})])
        ]
    )


def test_changed_harness_shows_differences(tapes: list[Cassette]) -> None:
    decode, encode, group = Tokenizer.decode, Tokenizer.encode, RolloutWorker.build_groups

    def swapped(self: Any, rollouts: Any, params: Any) -> Any:
        raise KeyError("group")

    with mock.patch.object(Tokenizer, "decode", lambda *args: decode(*args).replace("*", "+")):
        assert {"text", "observation"} <= kinds(found(tapes))
    with mock.patch.object(Tokenizer, "encode", lambda self, text: [*encode(self, text), 9]):
        assert kinds(found(tapes[:1])) == {"tokens"}
    with mock.patch.object(EpisodeTotals, "add", lambda self, observation: None):
        assert kinds(found(tapes)) == {"reward", "term", "metric"}
    with mock.patch.object(RolloutWorker, "build_groups", swapped):
        assert [part[0].replayed for part in found(tapes)] == ["KeyError: 'group'"] * 4
    assert RolloutWorker.build_groups is group and not kinds(found(tapes))


def test_clusters_group_by_cause_and_choose_keeps_the_smallest(tapes: list[Cassette]) -> None:
    many = calculations(12)
    groups = cluster_cassettes(many)
    assert [len(group) for group in groups.values()] == [3, 3, 3, 3]
    assert len({describe_cause(tape) for tape in many}) == 4
    kept = choose_cassettes(groups, 1)
    for name, (tape,) in kept.items():
        assert tape.tokens == min(other.tokens for other in groups[name])
    assert sum(len(group) for group in choose_cassettes(groups, 2).values()) == 8
    share = sum(is_held_out(f"{number:064x}", 0.5) for number in range(400))
    assert 150 < share < 250 and not is_held_out(NAME, 0.0) and is_held_out(NAME, 1.0)


def test_suite_reports_failures_and_accepts_changes(tapes: list[Cassette], tmp_path: Path) -> None:
    suite = suite_of(tapes, tmp_path)
    report = run_suite(suite)
    assert not report.failed and report.change is not None and report.change.mean == 0.0
    assert report.recorded is not None and report.recorded.mean == 0.5
    encode = Tokenizer.encode
    with mock.patch.object(Tokenizer, "encode", lambda self, text: [*encode(self, text), 9]):
        report = run_suite(suite)
        assert len(report.failed) == 3  # the guessed answer has no observation
        diff = suite.accept({failure.case.digest: failure.replay.expectations() for failure in report.failed})
        assert diff.count("@@") >= 3
        assert not run_suite(Suite(suite.root)).failed
    assert len(run_suite(Suite(suite.root)).failed) == 3
    back = {failure.case.digest: failure.replay.expectations() for failure in run_suite(suite).failed}
    suite.accept(back)
    assert all(case.accepted is None for case in Suite(suite.root).index.cases)


def test_interval_of_all_passed_suite_reaches_below_100_percent(
    tapes: list[Cassette], tmp_path: Path
) -> None:
    """A few correct answers do not prove that all are correct: the interval reaches below 90%."""
    report = run_suite(suite_of([tape for tape in tapes if tape.tracks[0].verdict.reward == 1.0], tmp_path))
    assert report.replayed is not None and report.replayed.mean == 1.0 and report.replayed.low < 0.9


def test_damaged_suite_is_refused(tapes: list[Cassette], tmp_path: Path) -> None:
    suite = suite_of(tapes[:1], tmp_path)
    (digest,) = suite.cassettes
    path = suite.root / "cassettes" / f"{digest}.json"
    original = path.read_text()
    for text, problem in (
        (original.replace('"reward":1.0', '"reward":0.0'), "the digest of the file is not its name"),
        (json.dumps({**json.loads(original), "more": 1}), "more"),
        ("[", "suite"),
    ):
        path.write_text(text)
        with pytest.raises(RequestError, match=problem):
            _ = Suite(suite.root).cassettes
    path.write_text(original)
    for file in (suite.root / "tokenizers").glob("*/tokenizer.json"):
        file.write_text(file.read_text() + " ")
    with pytest.raises(RequestError, match="missing or changed"):
        Suite(suite.root).tokenizer(next(iter(suite.cassettes.values())).tokenizer)
    with pytest.raises(RequestError, match="not a digest"):
        suite.tokenizer("../../etc")
    index = suite.root / "suite.json"
    index.write_text(index.read_text().replace(digest, "../" + digest[3:]))
    with pytest.raises(RequestError, match="pattern"):
        Suite(suite.root)


def test_environment_error_is_recorded_as_outcome() -> None:
    section = {"id": "tools", "task": "figure", "turns": 2, "episodes": {"seconds": 20}}
    (task,) = tasks(section, 1)
    code = "```python\nprint(1/0)\n```"
    (tape,) = played([draft(section, task, 0, [code, "<answer>0</answer>"])])
    assert describe_cause(tape) == "ZeroDivisionError, tools, right 0"
    assert not kinds(found([tape]))
    (cut,) = played([draft(section, task, 0, [code, code])])
    assert cut.tracks[0].verdict.finish_reason == "length" and describe_cause(cut).startswith("cut off")
    assert TOKENIZER.decode(list(cut.tracks[0].turns[0].tokens)) == code


def test_tasks_of_held_out_cases_are_not_trained_on(tapes: list[Cassette], tmp_path: Path) -> None:
    again = tapes[0].model_copy(update={"sampling": tapes[0].sampling.model_copy(update={"sample": 1})})
    held = {tapes[0].digest: False, again.digest: True, tapes[1].digest: False}
    pairs = [(Case(digest=t.digest, cause="", held_out=held[t.digest]), t) for t in (*tapes[:2], again)]
    write_suite(tmp_path / "suite", pairs, {NAME: TOKENIZER}, "")
    environment = make_environment({"id": "suite", "path": str(tmp_path / "suite"), "part": "held-out"})
    trained, evaluated = (
        {task.task_id for task in environment.tasks(split, 0)} for split in ("train", "heldout")
    )
    assert len(trained) == len(evaluated) == 1 and not trained & evaluated


def test_run_of_a_part_without_cases_is_an_error(tapes: list[Cassette], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no cases in the part held-out"):
        run_suite(suite_of(tapes, tmp_path), part="held-out")
