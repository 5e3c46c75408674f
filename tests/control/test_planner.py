"""Every combination of state, observation and situation goes through the pure planning function."""

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perilune.control.record.transitions import AttemptState
from perilune.control.runs.planner import (
    MAX_STARTS,
    STATES_BEFORE_START,
    RetryPolicy,
    Situation,
    Step,
    next_step,
    retry_class,
)
from perilune.execution.claim import Claim
from perilune.execution.observation import Observation
from perilune.execution.processes import Presence
from perilune.execution.verdict import Cause, Verdict

CLAIM = Claim(1, "host", "boot", 7, 7, "nonce")
VERDICT = Verdict(1, 0, None, "", "", "digest", 1.0)

OBSERVATIONS = [
    Observation(),
    Observation(superseded=True),
    Observation(unseen="the line is cut"),
    Observation(unseen="it has another host key", refused=True),
    *(Observation(CLAIM, worker, verdict) for worker, verdict in product(Presence, [None, VERDICT])),
]
SITUATIONS = [
    {"cancel": cancel, "force": force, "starting": starting, "starts": starts, "unseen_seconds": unseen}
    for (cancel, force), starting, starts, unseen in product(
        [(False, False), (True, False), (True, True)],
        [False, True],
        [0, 1, MAX_STARTS],
        [0.0, 1799.0, 1800.0],
    )
]


def is_unseen(seen: Observation) -> bool:
    return bool(seen.unseen or (seen.claim and seen.worker is Presence.UNKNOWN))


def all_situations() -> Iterator[tuple[AttemptState, Observation, dict[str, Any], Step]]:
    """All combinations of state, observation and situation, with the planned step."""
    for state, seen, now in product(AttemptState, OBSERVATIONS, SITUATIONS):
        yield state, seen, now, next_step(state, seen, Situation(**now))


def test_ended_attempts_only_wait() -> None:
    assert {step for state, _, _, step in all_situations() if state.is_terminal} == {Step.WAIT}


def test_verdict_is_always_finalized() -> None:
    steps = {step for state, seen, _, step in all_situations() if seen.verdict and not state.is_terminal}
    assert steps == {Step.FINALIZE}


def test_unseen_attempt_is_lost_only_after_timeout_or_force() -> None:
    unseen = [
        (now["unseen_seconds"] >= 1800 or now["force"], step)
        for state, seen, now, step in all_situations()
        if is_unseen(seen) and not seen.verdict and not state.is_terminal
        if not (seen.refused and state in STATES_BEFORE_START)
    ]
    assert {step for given_up, step in unseen if not given_up} == {Step.UNREACHABLE}
    assert {step for given_up, step in unseen if given_up} == {Step.LOSE}


def test_host_refusal_fails_attempt_only_before_start() -> None:
    refused = {(state, step) for state, seen, _, step in all_situations() if step is Step.REFUSED}
    assert refused == {(state, Step.REFUSED) for state in STATES_BEFORE_START}


def test_force_changes_nothing_for_visible_attempts() -> None:
    for state, seen, now, step in all_situations():
        if now["force"] and not is_unseen(seen):
            assert step is next_step(state, seen, Situation(**now | {"force": False}))


def test_claimed_attempt_is_never_staged_or_started() -> None:
    steps = {step for _, seen, _, step in all_situations() if seen.claim}
    assert not steps & {Step.STAGE, Step.START, Step.START_FAILED}


def test_death_needs_evidence() -> None:
    for state, seen, _, step in all_situations():
        if step is Step.DIED:
            vanished = seen.claim is None and state in {AttemptState.RUNNING, AttemptState.FINALIZING}
            assert vanished or seen.worker is Presence.ABSENT


def test_cancelled_attempt_never_advances() -> None:
    steps = {step for _, _, now, step in all_situations() if now["cancel"]}
    assert not steps & {Step.STAGE, Step.START, Step.ADOPT, Step.DIED}


def test_every_step_is_planned_in_some_situation() -> None:
    assert {step for _, _, _, step in all_situations()} == set(Step)


def test_start_is_repeated_up_to_a_maximum() -> None:
    nothing = Observation()
    steps = [next_step(AttemptState.STARTING, nothing, Situation(starts=n)) for n in range(MAX_STARTS + 1)]
    assert steps == [Step.START] * MAX_STARTS + [Step.START_FAILED]
    assert next_step(AttemptState.STARTING, nothing, Situation(starts=1, starting=True)) is Step.WAIT


def test_every_cause_has_a_retry_class_with_its_own_budget() -> None:
    policy = RetryPolicy(infrastructure=2, lost=1, user=0)
    classes = Counter(retry_class(cause) for cause in Cause)
    assert classes == {"infrastructure": 6, "preemption": 2, "lost": 2, "user": len(Cause) - 10}
    died, lost = Cause.RUNNER_DIED.value, Cause.UNREACHABLE.value
    assert policy.allows_retry(died, [])
    assert policy.allows_retry(died, [died, lost])
    assert not policy.allows_retry(died, [died, Cause.KILLED.value])
    assert not policy.allows_retry(lost, [lost])
    assert not policy.allows_retry(Cause.CRASHED, [])
    assert policy.allows_retry(Cause.STOPPED, [Cause.STOPPED.value] * 50)


@given(st.integers(0, 40))
def test_backoff_is_jittered_and_bounded(attempts: int) -> None:
    policy = RetryPolicy(base=5.0, cap=300.0)
    delays = {policy.sample_delay(attempts) for _ in range(20)}
    assert len(delays) > 1 and min(delays) >= 0 and max(delays) <= min(300.0, 5.0 * 2**attempts)
