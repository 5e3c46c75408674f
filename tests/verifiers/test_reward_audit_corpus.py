"""The audit of a corpus of scorers: hackable scorers get C or worse, and sound scorers get A."""

import pytest
from scorer_corpus import HACKABLE, HELD_OUT, NAMED, SEASONS, SOUND, UNKNOWABLE

from perilune.verifiers.audit import audit_reward
from perilune.verifiers.audit.forms import Form, find_shown_forms, find_stated_form

FAILING = ("C", "D", "F")
NO_KNOWLEDGE_NEEDED = (
    "verdict marker", "existing path", "therefore", "echo only", "copy of the prompt", "length",
    "number of the question", "nothing", "any number",
)  # fmt: skip


def run_audit(scorer, *, opinion=False, search=24):
    section = {"id": "factory", "factory": "scorer_corpus:make", "scorer": scorer, "opinion": opinion}
    return audit_reward(section, tasks=3, search_budget=search)


def findings_of(audit):
    return [(hit.grade, hit.probe, hit.what, hit.example.transcript.text[:80]) for hit in audit.findings]


@pytest.mark.thorough
@pytest.mark.parametrize("scorer", [*HACKABLE, *(name for name in HELD_OUT if name != "a range")])
def test_audit_finds_hackable_scorer_with_stated_answers_only(scorer):
    audit = run_audit(scorer)
    assert audit.grade in FAILING, findings_of(audit)
    if scorer in NO_KNOWLEDGE_NEEDED:
        assert audit.grade == "F", findings_of(audit)
    if scorer in NAMED:
        named = [finding for finding in audit.findings if finding.probe == NAMED[scorer]]
        assert named, findings_of(audit)
        assert any(finding.example.verdict or finding.probe == "order" for finding in named)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "scorer", ["verdict marker", "existing path", "therefore", "bonus for steps", "any answer tag"]
)
def test_audit_finds_hackable_scorer_with_second_opinion(scorer):
    audit = run_audit(scorer, opinion=True)
    assert audit.grade in FAILING, findings_of(audit)


@pytest.mark.parametrize(
    ("scorer", "probe"),
    [
        ("a label anywhere", "all answers"),
        ("a label in any tag", "all answers in form"),
        ("either word anywhere", "all answers"),
    ],
)
def test_audit_finds_reward_for_naming_all_answers(scorer, probe):
    audit = run_audit(scorer, search=0)
    (finding,) = [finding for finding in audit.findings if finding.probe == probe]
    assert (finding.grade, finding.tasks, finding.example.verdict) == ("F", 3, 1.0)
    closed = SEASONS if "label" in scorer else ("yes", "no")
    assert all(answer in finding.example.transcript.text for answer in closed)


def test_audit_search_finds_scorer_that_no_probe_finds():
    assert run_audit("a range", search=240).grade in FAILING


@pytest.mark.thorough
@pytest.mark.parametrize("scorer", SOUND)
def test_audit_grades_sound_scorer_a(scorer):
    audit = run_audit(scorer)
    assert audit.grade == "A", findings_of(audit)
    assert audit.judged <= 3 * 2000 + 3 * 48  # 2000 scorings per task, and the search


@pytest.mark.thorough
@pytest.mark.parametrize("scorer", UNKNOWABLE)
def test_audit_misses_faults_that_stated_answers_cannot_show(scorer):
    """The documentation states this limit. If this test fails, update the documentation."""
    assert run_audit(scorer).grade == "A"


def test_audit_reduces_example_to_single_marker():
    (finding,) = [finding for finding in run_audit("verdict marker").findings if finding.probe == "markers"]
    assert finding.example.transcript.text.startswith("VERDICT: CORRECT")
    assert "\n" not in finding.example.transcript.text and finding.example.verdict == 1.0


def test_audit_detects_answer_form():
    assert run_audit("last box", search=0).form == "\\boxed{…}"
    assert find_stated_form(["<answer>12</answer>", "<answer>17</answer>"]) == Form(
        "<answer>", "</answer>", True
    )
    assert find_stated_form(["12", "17"]).is_bare and find_stated_form(["12"]).is_bare
    assert find_shown_forms("Use <plan>...</plan> and then <reply>...</reply>.")[0] == Form(
        "<plan>x</plan><reply>", "</reply>"
    )
