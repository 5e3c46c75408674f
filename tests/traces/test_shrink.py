"""Shrunk cassettes are minimal and fail with the same cause."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from trace_cases import CALCULATOR, calculations, draft, played, replay, tasks, tokenizer_of

from perilune.environments.core.episode_totals import EpisodeTotals
from perilune.environments.core.protocol import Score
from perilune.errors import WorkFailedError
from perilune.traces.baseline import differs_in_installation, run_in_installation
from perilune.traces.causes import describe_cause
from perilune.traces.oracle import make_expectation
from perilune.traces.replay import Replayer
from perilune.traces.shrink import Shrinker, has_same_cause, minimize


@pytest.mark.parametrize("needed", [(), (3,), (0, 19), (4, 5, 6), (1, 7, 8, 18)])
def test_delta_debugging_keeps_exactly_the_needed_elements(needed: tuple[int, ...]) -> None:
    def first(candidates: Sequence[Sequence[int]]) -> int | None:
        hits = [index for index, candidate in enumerate(candidates) if set(needed) <= set(candidate)]
        return hits[0] if hits else None

    assert minimize(range(20), first) == list(needed)


def test_shrunk_cassette_is_minimal_with_the_same_cause() -> None:
    (task,) = tasks(CALCULATOR, 1)
    actions = [*task.data["actions"][:-1], "no call", "1+1", "2*2", ";0007"]
    (tape,) = played([draft(CALCULATOR, task, 0, actions)])
    with Replayer(tokenizer_of) as replayer:
        small = Shrinker(has_same_cause(tape), replayer).shrink(tape)
        assert Shrinker(has_same_cause(small), replayer).shrink(small) == small
        never = Shrinker(lambda played: [False] * len(played), replayer)
        assert never.shrink(tape) == tape
    assert describe_cause(small) == describe_cause(tape) == "calculator, right 0, well_formed 0"
    assert small.tokens < 0.3 * tape.tokens and small.shrunk_from == tape.digest
    assert [action.text for action in small.actions()] == ["", ";0007"] or len(small.order) == 2
    (again,) = replay([small])
    assert not again.differences(tuple(map(make_expectation, small.tracks)))


def test_shrinking_keeps_truncated_turn_truncated() -> None:
    (task,) = tasks(CALCULATOR, 1)
    whole = draft(CALCULATOR, task, 0, ["1+1", "2+2 and much more"])
    track = whole.tracks[0]
    last = track.turns[-1].model_copy(update={"finished": False, "tokens": track.turns[-1].tokens[:-1]})
    cut = track.model_copy(update={"turns": (*track.turns[:-1], last)})
    (tape,) = played([whole.model_copy(update={"tracks": (cut,)})])
    with Replayer(tokenizer_of) as replayer:
        small = Shrinker(has_same_cause(tape), replayer).shrink(tape)
    assert describe_cause(small).startswith("cut off") and len(small.order) == 1
    assert not small.actions()[0].finished and small.tokens < tape.tokens
    (again,) = replay([small])
    assert not again.differences(tuple(map(make_expectation, small.tracks)))


def test_differs_from_compares_with_another_installation() -> None:
    """The other installation is this one without the change that the test patches in."""
    tapes = calculations(2)
    python, score = Path(sys.executable), EpisodeTotals.score

    def generous(totals: EpisodeTotals, player: int = 0) -> Score:
        return replace(score(totals, player), reward=1.0)

    with mock.patch.object(EpisodeTotals, "score", generous):
        changed = played(tapes)
    fails = differs_in_installation(python, tokenizer_of, frozenset({"reward"}))
    assert fails(changed) == [False, True] and fails([]) == []
    known = {tape.digest: {"reward", "term"} for tape in changed}
    with mock.patch("perilune.traces.baseline.run_in_installation", return_value=known):
        assert differs_in_installation(python, tokenizer_of, frozenset({"observation"}))(changed) == [
            False,
            False,
        ]
        assert differs_in_installation(python, tokenizer_of, frozenset())(changed) == [True, True]
    for other in ("/bin/true", "/no/python"):
        with pytest.raises(WorkFailedError, match="cannot run the suite"):
            run_in_installation(Path(other), tapes, tokenizer_of)
