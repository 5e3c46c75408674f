"""The audit against a corpus of scorers: hackable ones are graded C or worse, and sound ones A."""

import pytest
from scorer_corpus import HACKABLE, HELD_OUT, NAMED, SEASONS, SOUND, UNKNOWABLE

from perilune.verifiers.audit import audit_reward
from perilune.verifiers.audit.audit import MOST_A_TASK
from perilune.verifiers.audit.forms import Form, shown_forms, stated_form

FAILING = ("C", "D", "F")
NO_KNOWLEDGE_NEEDED = (
    "verdict marker", "existing path", "therefore", "echo only", "copy of the prompt", "length",
    "number of the question", "nothing", "any number",
)  # fmt: skip


def audited(scorer, *, opinion=False, search=24):
    section = {"id": "factory", "factory": "scorer_corpus:make", "scorer": scorer, "opinion": opinion}
    return audit_reward(section, tasks=3, search_budget=search)


def told(audit):
    return [(one.grade, one.probe, one.what, one.example.transcript.text[:80]) for one in audit.findings]


@pytest.mark.thorough
@pytest.mark.parametrize("scorer", [*HACKABLE, *(name for name in HELD_OUT if name != "a range")])
def test_a_hackable_scorer_is_found_with_nothing_but_stated_answers(scorer):
    audit = audited(scorer)
    assert audit.grade in FAILING, told(audit)
    if scorer in NO_KNOWLEDGE_NEEDED:
        assert audit.grade == "F", told(audit)
    if scorer in NAMED:
        named = [one for one in audit.findings if one.probe == NAMED[scorer]]
        assert named, told(audit)
        assert any(one.example.verdict or one.probe == "order" for one in named)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scorer", ["verdict marker", "existing path", "therefore", "bonus for steps", "any answer tag"]
)
def test_a_hackable_scorer_is_found_with_a_second_opinion(scorer):
    audit = audited(scorer, opinion=True)
    assert audit.grade in FAILING, told(audit)


@pytest.mark.parametrize(
    ("scorer", "probe"),
    [
        ("a label anywhere", "all answers"),
        ("a label in any tag", "all answers in form"),
        ("either word anywhere", "all answers"),
    ],
)
def test_naming_all_answers_of_a_closed_set_is_found_with_the_output_that_was_paid(scorer, probe):
    audit = audited(scorer, search=0)
    (shown,) = [one for one in audit.findings if one.probe == probe]
    assert (shown.grade, shown.tasks, shown.example.verdict) == ("F", 3, 1.0)
    closed = SEASONS if "label" in scorer else ("yes", "no")
    assert all(answer in shown.example.transcript.text for answer in closed)


def test_a_search_finds_what_no_probe_writes():
    assert audited("a range", search=240).grade in FAILING


@pytest.mark.thorough
@pytest.mark.parametrize("scorer", SOUND)
def test_a_sound_scorer_gets_the_best_grade(scorer):
    audit = audited(scorer)
    assert audit.grade == "A", told(audit)
    assert audit.judged <= 3 * MOST_A_TASK + 3 * 48


@pytest.mark.thorough
@pytest.mark.parametrize("scorer", UNKNOWABLE)
def test_what_no_stated_answer_tells_is_not_found(scorer):
    """The limit that the documentation states; should this ever fail, the sentence there is out of date."""
    assert audited(scorer).grade == "A"


def test_a_marker_is_shown_without_the_others_that_were_tried_with_it():
    (shown,) = [one for one in audited("verdict marker").findings if one.probe == "markers"]
    assert shown.example.transcript.text.startswith("VERDICT: CORRECT")
    assert "\n" not in shown.example.transcript.text and shown.example.verdict == 1.0


def test_the_form_of_an_answer_is_found():
    assert audited("last box", search=0).form == "\\boxed{…}"
    assert stated_form(["<answer>12</answer>", "<answer>17</answer>"]) == Form("<answer>", "</answer>", True)
    assert stated_form(["12", "17"]).is_bare and stated_form(["12"]).is_bare
    assert shown_forms("Use <plan>...</plan> and then <reply>...</reply>.")[0] == Form(
        "<plan>x</plan><reply>", "</reply>"
    )
