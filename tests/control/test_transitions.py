"""State machines of runs, attempts and machines: database rows refuse every transition not listed here."""

from itertools import product

import pytest

from perilune.control.record.store import Attempt, Machine, Run
from perilune.control.record.transitions import AttemptState, IllegalTransitionError, MachineState, RunState

RUN = """
queued -> active failed cancelled
active -> queued succeeded failed cancelled
"""
ATTEMPT = """
planned -> provisioning staging preempted lost cancelled
provisioning -> staging failed preempted lost cancelled
staging -> starting failed preempted lost cancelled
starting -> running finalizing failed preempted lost cancelled
running -> finalizing failed preempted lost cancelled
finalizing -> succeeded failed preempted lost cancelled
"""
MACHINE = """
requested -> ready terminating gone
ready -> draining terminating gone
draining -> terminating gone
terminating -> gone
gone -> terminating
"""


def legal(table: str) -> set[tuple[str, str]]:
    lines = [line.split(" -> ") for line in table.strip().splitlines()]
    return {(before, after) for before, afters in lines for after in afters.split()}


@pytest.mark.parametrize(
    ("row", "states", "table"),
    [(Run, RunState, RUN), (Attempt, AttemptState, ATTEMPT), (Machine, MachineState, MACHINE)],
    ids=["run", "attempt", "machine"],
)
def test_only_listed_transitions_are_allowed(row: type, states: type, table: str) -> None:
    for before, after in product(states, states):
        stored = row(state=before.value)
        if (before.value, after.value) in legal(table):
            stored.state = after.value
            assert stored.state == after.value
        else:
            with pytest.raises(IllegalTransitionError):
                stored.state = after.value
            assert stored.state == before.value


def test_terminal_states() -> None:
    assert {state for state in RunState if state.is_terminal} == {"succeeded", "failed", "cancelled"}
    ended = {"succeeded", "failed", "preempted", "lost", "cancelled"}
    assert {state for state in AttemptState if state.is_terminal} == ended
