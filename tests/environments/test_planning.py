"""Trip planning: solvers and verifier match brute force, and each constraint is a reward term."""

import itertools
import random
import sys
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.generators import make_teacher, verify_candidates
from perilune.data.records import TraceRecord
from perilune.environments import Score, Transcript, make_environment
from perilune.environments.builtin.planning import compact, words
from perilune.environments.builtin.planning.constraints import TERMS, check_plan, total_interest
from perilune.environments.builtin.planning.draw import draw_trip
from perilune.environments.builtin.planning.optimum import find_best_plan, solve_by_cpsat, solve_by_sets
from perilune.environments.builtin.planning.second_opinion import is_valid_plan
from perilune.environments.builtin.planning.tasks import trip_digest
from perilune.environments.builtin.planning.trip import Place, Trip, Visit, Window, travel_steps
from perilune.environments.builtin.planning.trip_settings import TripSettings
from perilune.environments.core.replay import replay_agent_conversations
from perilune.errors import RequestError
from perilune.verifiers.audit import audit_reward
from perilune.verifiers.conformance import check_environment

STYLES = {"compact": compact, "words": words}
HARD = {"places": 5, "visits": 3, "days": 2, "windows": 1, "map": "plane"}


@st.composite
def trip_settings(draw, most_places=6, longest=20):
    places = draw(st.integers(1, most_places))
    visits = draw(st.integers(1, min(places, 3)))
    return TripSettings(
        places=places,
        visits=visits,
        must_see=draw(st.integers(0, visits)),
        windows=draw(st.integers(0, visits)),
        days=draw(st.integers(1, 2)),
        length=longest,
        slack=draw(st.integers(0, 6)),
        budget_slack=draw(st.sampled_from([0.0, 0.25, 1.0])),
        map=draw(st.sampled_from(["street", "plane"])),
    )


@st.composite
def drawn_trips(draw, **limits):
    return draw_trip(draw(trip_settings(**limits)), random.Random(draw(st.integers(0, 10**6))))


def broken_terms(trip, plan):
    return {name for name, holds in check_plan(trip, plan).items() if not holds}


def every_plan(trip):
    """All plans, valid or not: each place is left out, or entered on some day at some step."""
    entries = [None, *itertools.product(range(1, trip.days + 1), range(trip.length))]
    for chosen in itertools.product(entries, repeat=len(trip.places)):
        visits = [Visit(*at, p.name) for at, p in zip(chosen, trip.places, strict=True) if at is not None]
        yield sorted(visits, key=lambda visit: (visit.day, visit.start))


@given(drawn_trips(), st.sampled_from(sorted(STYLES)))
@settings(max_examples=60, deadline=None)
def test_planted_and_best_plans_are_accepted_in_each_style(made, style):
    trip, planted = made
    best = find_best_plan(trip, 1.0)
    assert best.interest == best.bound and total_interest(trip, best.plan) == best.interest >= total_interest(
        trip, planted
    )
    writing = STYLES[style]
    for plan in (planted, best.plan):
        assert not broken_terms(trip, plan)
        for text in (
            writing.write_plan(trip, plan),
            writing.write_working(trip, plan) + writing.write_plan(trip, plan),
        ):
            assert list(writing.read_plan(text)) == list(plan)
            assert is_valid_plan(trip.to_json(), style, text)


@pytest.mark.thorough
@given(drawn_trips(most_places=3, longest=7), st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_verifier_and_solvers_match_brute_force_over_plans(made, poorer, more):
    trip = replace(made[0], budget=max(0, made[0].budget - poorer), visits=made[0].visits + more // 3)
    good = []
    for plan in every_plan(trip):
        text = compact.write_plan(trip, plan)
        accepted = not broken_terms(trip, plan)
        assert is_valid_plan(trip.to_json(), "compact", text) == accepted
        if accepted:
            good.append(total_interest(trip, plan))
    for result in (solve_by_sets(trip), solve_by_cpsat(trip, 1.0)):
        if result is None:
            assert not good
        else:
            assert not broken_terms(trip, result.plan)
            assert result.interest == result.bound and max(good) == result.interest == total_interest(
                trip, result.plan
            )


@pytest.mark.thorough
@given(drawn_trips(most_places=6), st.integers(0, 8), st.integers(0, 2))
@settings(max_examples=25, deadline=None)
def test_both_solvers_find_plans_of_equal_interest(made, poorer, more):
    trip = replace(made[0], budget=max(0, made[0].budget - poorer), visits=made[0].visits + more)
    sets, solver = solve_by_sets(trip), solve_by_cpsat(trip, 1.0)
    assert (sets is None) == (solver is None)
    if sets is not None:
        assert sets.interest == solver.interest == solver.bound
        assert not broken_terms(trip, sets.plan) and not broken_terms(trip, solver.plan)


THREE = {
    "A": Place("A", (1, 0), 0, 12, 1, 3, 5),
    "B": Place("B", (2, 0), 0, 12, 2, 4, 7),
    "C": Place("C", (3, 0), 0, 12, 1, 5, 9),
}


@pytest.mark.parametrize(
    ("trip", "places", "best"),
    [
        ({}, {}, 21),
        ({"length": 9}, {}, 16),
        ({"budget": 11}, {}, 16),
        ({"visits": 3, "length": 9}, {}, None),
        ({}, {"A": {"window": Window(1, 1, 1)}, "B": {"window": Window(1, 2, 2)}}, 16),
        ({}, {"A": {"window": Window(1, 9, 9)}, "B": {"window": Window(1, 8, 8)}}, 16),
        ({}, {"A": {"window": Window(2, 1, 9)}}, 16),
        ({"days": 2, "length": 7}, {"C": {"window": Window(1, 3, 4)}, "B": {"window": Window(1, 2, 4)}}, 14),
        ({}, {"B": {"closes": 4}, "C": {"closes": 4}}, 14),
        ({}, {"B": {"opens": 9}, "C": {"opens": 8}}, 14),
        ({"length": 7}, {}, 12),
        ({"length": 7}, {"C": {"must_see": True}}, 9),
        ({"length": 6}, {"C": {"must_see": True}}, None),
        ({"days": 2, "length": 7}, {}, 21),
    ],
)
def test_both_solvers_respect_every_constraint(trip, places, best):
    made = tuple(replace(place, **places.get(name, {})) for name, place in THREE.items())
    tight = replace(Trip(1, 12, 12, 1, made), **trip)
    good = [total_interest(tight, plan) for plan in every_plan(tight) if not broken_terms(tight, plan)]
    assert max(good, default=None) == best
    for solution in (solve_by_sets(tight), solve_by_cpsat(tight, 1.0)):
        assert (solution and solution.interest) == best
        assert solution is None or (
            solution.interest == solution.bound and not broken_terms(tight, solution.plan)
        )


TRIP = Trip(
    days=1,
    length=20,
    budget=20,
    visits=2,
    places=(
        Place("A", (2, 0), 0, 20, 1, 3, 5, must_see=True),
        Place("B", (5, 0), 3, 15, 2, 4, 7, window=Window(1, 5, 9)),
        Place("C", (1, 0), 0, 20, 1, 1, 2),
    ),
)
PLAN = (Visit(1, 2, "A"), Visit(1, 6, "B"))


@pytest.mark.parametrize(
    ("name", "change", "plan"),
    [
        ("known", {}, (*PLAN, Visit(1, 12, "Z"))),
        ("once", {}, (*PLAN, Visit(1, 14, "A"))),
        ("travel", {}, (Visit(1, 2, "A"), Visit(1, 5, "B"))),
        ("travel", {}, (Visit(1, 1, "A"), Visit(1, 6, "B"))),
        ("travel", {}, (Visit(1, 6, "B"), Visit(1, 2, "A"))),
        ("hours", {"places": (TRIP.places[0], replace(TRIP.places[1], closes=7), TRIP.places[2])}, PLAN),
        ("hours", {"places": (TRIP.places[0], replace(TRIP.places[1], opens=7), TRIP.places[2])}, PLAN),
        ("window", {}, (Visit(1, 2, "A"), Visit(1, 10, "B"))),
        ("window", {"days": 2}, (Visit(1, 2, "A"), Visit(2, 6, "B"))),
        ("day", {"length": 12}, PLAN),
        ("day", {}, (Visit(1, 6, "B"), Visit(2, 2, "A"))),
        ("budget", {"budget": 6}, PLAN),
        ("must_see", {}, (Visit(1, 1, "C"), Visit(1, 6, "B"))),
        ("visits", {"visits": 3}, PLAN),
    ],
)
def test_plan_that_breaks_constraint_fails_only_its_term(name, change, plan):
    assert not broken_terms(TRIP, PLAN)
    trip = replace(TRIP, **change)
    assert broken_terms(trip, plan) == {name}
    assert not is_valid_plan(trip.to_json(), "compact", compact.write_plan(trip, plan))
    assert not is_valid_plan(trip.to_json(), "words", words.write_plan(trip, plan))


@given(drawn_trips())
@settings(max_examples=60, deadline=None)
def test_tightened_trip_breaks_only_tightened_term(made):
    trip, plan = made
    last = plan[-1]
    place = trip.find_place(last.name)
    others = tuple(other for other in trip.places if other is not place)
    end = last.start + place.stay

    def with_place(**changes):
        return replace(trip, places=(*others, replace(place, **changes)))

    assert broken_terms(replace(trip, budget=sum(trip.find_place(v.name).price for v in plan) - 1), plan) == {
        "budget"
    }
    assert broken_terms(replace(trip, visits=len(plan) + 1), plan) == {"visits"}
    assert broken_terms(with_place(closes=end - 1), plan) == {"hours"}
    assert broken_terms(with_place(opens=last.start + 1), plan) == {"hours"}
    assert broken_terms(with_place(window=Window(last.day, last.start + 1, 99)), plan) == {"window"}
    assert broken_terms(with_place(at=(99, 0), opens=0), plan) >= {"travel", "day"}
    latest = max(
        v.start + trip.find_place(v.name).stay + travel_steps(trip.find_place(v.name).at, (0, 0))
        for v in plan
    )
    assert broken_terms(replace(trip, length=latest - 1), plan) == {"day"}
    missed = Place("Z", (0, 0), 0, 1, 1, 1, 1, must_see=True)
    assert broken_terms(replace(trip, places=(*trip.places, missed)), plan) == {"must_see"}


@pytest.mark.parametrize(
    "text",
    [
        "", "A02,B06", ";A2,B6", "; A02,B06", ";A02, B06", ";A02,,B06", ";A02;B06", "x;A02,B06;", ";a02,b06",
        ";A02,B06.", ";A02,B06 A", ";٠A02", ";A٠٢,B٠٦", ";A02,B06,", ";A-2,B06", ";A002",
    ],
)  # fmt: skip
def test_malformed_compact_plan_fails_all_terms(text):
    assert compact.read_plan(text) is None
    assert broken_terms(TRIP, compact.read_plan(text)) == set(TERMS)
    assert not is_valid_plan(TRIP.to_json(), "compact", text)


@pytest.mark.parametrize(
    "text",
    [
        "1 10:00 aquarium", "PLAN\n1 10:00 aquarium\nPLAN", "PLAN\n1 10:15 aquarium",
        "PLAN\n1 8:30 aquarium", "PLAN\n1 08:30 aquarium", "PLAN\n1 10:60 aquarium",
        "PLAN\n1 10:00  aquarium", "PLAN 1 10:00 aquarium",
        "PLAN\n- 1 10:00 aquarium", "PLAN\n1 10:00 Aquarium", "PLAN\n\n1 10:00 aquarium",
    ],
)  # fmt: skip
def test_malformed_plan_in_words_is_rejected(text):
    assert words.read_plan(text) is None and not is_valid_plan(TRIP.to_json(), "words", text)


def test_compact_prompt_working_and_plan():
    assert (
        compact.render_prompt(TRIP)
        == "T20 $20 #2\nA2 00-20 1 $3 *5!\nB5 03-15 2 $4 *7 @05-09\nC1 00-20 1 $1 *2\n"
    )
    worked = "A2 00-20 1 $3+2=02>02-03$17 B5 03-15 2 $4+3=06>06-08$13"
    assert (compact.write_working(TRIP, PLAN), compact.write_plan(TRIP, PLAN)) == (worked, ";A02,B06")
    two = replace(TRIP, days=2, places=(replace(TRIP.places[0], window=Window(2, 1, 4)), *TRIP.places[1:]))
    assert compact.render_prompt(two).startswith("T20 $20 #2 D2\nA2 00-20 1 $3 *5! @2:01-04\n")
    assert compact.write_plan(two, (Visit(1, 6, "B"), Visit(2, 2, "A"))) == ";B06/A02"
    assert compact.write_plan(two, (Visit(2, 2, "A"),)) == ";/A02"
    plane = replace(TRIP, places=(replace(TRIP.places[0], at=(2, 1)), *TRIP.places[1:]))
    assert "A2,1 00-20" in compact.render_prompt(plane)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("planning", "words"),
        ("planning_repair", "compact"),
        pytest.param("planning", "compact", marks=pytest.mark.thorough),
        pytest.param("planning_repair", "words", marks=pytest.mark.thorough),
    ],
)
def test_planning_passes_conformance_and_audit(name, style):
    section = {"id": name, "style": style, **HARD}
    report = check_environment(section, tasks=2)
    assert not report.findings, report.findings
    audit = audit_reward(section, tasks=3, search_budget=72)
    assert audit.grade == "A", audit.findings
    assert audit.searched and not audit.unjudged


def test_tasks_are_reproducible_and_splits_share_no_trip():
    environment = make_environment({"id": "planning", **HARD})
    first = list(islice(environment.tasks("train", 3), 20))
    assert first == list(islice(environment.tasks("train", 3), 20))
    assert first != list(islice(environment.tasks("train", 4), 20))
    renamed = replace(TRIP, places=tuple(replace(p, name=n) for p, n in zip(TRIP.places, "CAB", strict=True)))
    shuffled = replace(TRIP, places=TRIP.places[::-1])
    assert trip_digest(TRIP) == trip_digest(renamed) == trip_digest(shuffled)
    assert trip_digest(TRIP) != trip_digest(replace(TRIP, budget=19))
    few = {"id": "planning", "places": 1, "visits": 1, "length": 6, "slack": 0, "budget_slack": 0}
    small = make_environment(few)
    train, heldout = ({task.task_id for task in small.tasks(split, 0)} for split in ("train", "heldout"))
    assert train and heldout and not train & heldout


def test_reward_is_feasibility_unless_quality_has_weight():
    section = {"id": "planning", "places": 6, "budget_slack": 1.0, "slack": 8}
    plain = make_environment(section)
    weighted = make_environment(section | {"rewards": {"verifier": 1.0, "quality": 0.5}})
    shares = []
    for task in islice(plain.tasks("train", 0), 12):
        planted, best = Transcript(task.data["planted"]), plain.gold(task)
        score = plain.score(task, planted)
        assert score.reward == 1.0 == plain.score(task, best).terms["quality"]
        shares.append(score.terms["quality"])
        assert weighted.score(task, planted).reward == 1.0 + 0.5 * shares[-1]
        everywhere = ";" + ",".join(f"{letter}00" for letter in "ABCDEF")
        beyond = plain.score(task, Transcript(everywhere))
        assert (beyond.reward, beyond.terms["quality"]) == (0.0, 0.0)
        assert beyond.metrics["interest"] > score.metrics["interest"]
        cut = replace(best, finished=False)
        assert plain.score(task, cut).terms == dict.fromkeys([*TERMS, "quality"], 0.0)
        assert weighted.score(task, cut).reward == 0.0
    assert 0 < min(shares) < 1


def test_cpsat_solves_large_trips_deterministically():
    section = {"id": "planning", "places": 13, "visits": 4, "days": 2}
    first, again = (
        list(islice(make_environment(section).tasks("train", 1), 2)) for _ in range(2)
    )  # CP-SAT, one worker, a fixed seed
    assert first == again
    assert all(task.data["interest"] == task.data["bound"] for task in first)


def test_large_trips_name_missing_solver_and_small_trips_need_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    assert next(make_environment({"id": "planning"}).tasks("train", 0))
    with pytest.raises(RequestError, match="OR-Tools") as caught:
        next(make_environment({"id": "planning", "places": 11}).tasks("train", 0))
    assert "perilune[planning]" in caught.value.remedy


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"visits": 5}, "visits is 5, but there are only 4 places"),
        ({"must_see": 3}, "must not exceed visits"),
        ({"windows": 3}, "must not exceed visits"),
        ({"places": 27}, "less than or equal to 26"),
        ({"tempo": 3}, "no field 'tempo'"),
    ],
)
def test_invalid_trip_settings_are_rejected(change, error):
    with pytest.raises(RequestError, match=error):
        make_environment({"id": "planning", **change})


def test_first_task_fails_when_visits_never_fit():
    crowded = make_environment({"id": "planning", "places": 9, "visits": 9, "length": 6})
    with pytest.raises(RequestError, match="hardly ever fit") as caught:
        next(crowded.tasks("train", 0))
    assert caught.value.where == "environment.length"


def test_repair_names_broken_terms_until_proposal_works():
    environment = make_environment({"id": "planning_repair", **HARD, "proposals": 3})
    task = next(environment.tasks("train", 0))
    (right,) = environment.gold(task).actions
    session = environment.reset(task, 0)
    reply = session.step("nothing")
    assert [dict(turn) for turn in reply.messages] == [{"role": "tool", "content": f"?{','.join(TERMS)}\n"}]
    assert "visits" in session.step(";").messages[0]["content"]
    end = session.step(right)
    assert end.done and end.rewards == (1.0,) and end.metrics["proposals"] == 3.0
    assert environment.score(task, Transcript(right, earlier=("nothing", ";"))) == Score(
        1.0, end.terms, end.metrics
    )
    hopeless = environment.score(task, Transcript(";", earlier=(";", ";")))
    assert hopeless.reward == 0.0 and hopeless.terms["syntax"] == 1.0


@pytest.mark.parametrize("style", STYLES)
def test_planning_teacher_writes_accepted_plans_with_each_strategy(style):
    environment = make_environment({"id": "planning_repair", "style": style, **HARD})
    tasks = list(islice(environment.tasks("train", 0), 30))
    teacher = make_teacher("planning", {"worked": 0.3, "direct": 0.3, "mended": 0.4})
    score = lambda pairs: [environment.score(*pair) for pair in pairs]  # noqa: E731
    converse = lambda *pair: replay_agent_conversations(environment, *pair)  # noqa: E731
    rows = list(
        verify_candidates(teacher.candidates(tasks, 0), score, environment="e", seed=0, converse=converse)
    )
    assert len(rows) == 30 and all(isinstance(row, TraceRecord) for row in rows)
    assert {row.source.rpartition("/")[2] for row in rows} == {"worked", "direct", "mended"}
    mended = [row for row in rows if len(row.messages) > 2]
    assert mended and all(row.source == "planning/mended" for row in mended)
    assert all(
        [m["role"] for m in row.messages] == ["user", "assistant", "tool", "assistant"] for row in mended
    )


def test_planning_teacher_rejects_unsupported_environments():
    trip = next(make_environment({"id": "planning"}).tasks("train", 0))
    with pytest.raises(RequestError, match="needs an environment with several proposals"):
        list(make_teacher("planning", {"mended": 1.0}).candidates([trip], 0))
    other = next(make_environment({"id": "calculator"}).tasks("train", 0))
    with pytest.raises(RequestError, match="supports only the planning environments"):
        list(make_teacher("planning").candidates([other], 0))
