"""Programs of sub-agents that run at the same time."""

import pytest

from perilune.environments import AgentTurn, Programs, gather
from perilune.environments.core.agents import RemainingTurns


def speak(name, turns, closed=()):
    """A program that takes `turns` turns and returns its name and actions."""
    actions = []
    try:
        for _ in range(turns):
            actions += yield [AgentTurn(name, ())]
        return name, actions
    finally:
        if isinstance(closed, list):
            closed.append(name)


def agents_due(programs):
    return [turn.agent for turn in programs.turns]


def test_program_may_start_while_others_run():
    programs = Programs()
    programs.start(speak("0", 3))
    assert agents_due(programs) == ["0"]
    programs.take(["a"])
    programs.start(speak("1", 1))
    assert agents_due(programs) == ["0", "1"]
    programs.take(["b", "x"])
    assert programs.results == {1: ("1", ["x"])} and agents_due(programs) == ["0"]
    programs.start(speak("2", 0))
    assert programs.results[2] == ("2", [])
    programs.take(["c"])
    assert programs.results[0] == ("0", ["a", "b", "c"]) and not programs.turns


def test_close_ends_unfinished_programs():
    programs, closed = Programs(), []
    for name in "012":
        programs.start(speak(name, 1 + (name == "1"), closed))
    programs.take(["a", "b", "c"])
    assert closed == ["0", "2"]
    programs.close()
    assert closed == ["0", "2", "1"]


def test_together_returns_results_in_order_of_programs():
    running = gather([speak("0", 2), speak("1", 1), speak("2", 0)])
    assert [turn.agent for turn in next(running)] == ["0", "1"]
    assert [turn.agent for turn in running.send(["a", "x"])] == ["0"]
    try:
        running.send(["b"])
    except StopIteration as end:
        assert end.value == [("0", ["a", "b"]), ("1", ["x"]), ("2", [])]
    else:
        raise AssertionError("the programs have not ended")


@pytest.mark.parametrize("place", [0, 1, 4])
def test_remaining_turns_behave_like_slice(place: int) -> None:
    turns = [AgentTurn(str(number), ()) for number in range(5)]
    rest = RemainingTurns(turns, place)
    assert rest == turns[place:] and [*rest] == turns[place:] and len(rest) == 5 - place
    assert (rest[0], rest[-1], rest[1:]) == (turns[place], turns[-1], turns[place:][1:])
    with pytest.raises(IndexError):
        rest[5 - place]
