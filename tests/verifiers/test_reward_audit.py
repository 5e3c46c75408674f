"""The reward audit: its findings for scorers with one fault each, and for a sound scorer."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from perilune.cli.data.environments import app
from perilune.environments import Transcript, make_environment
from perilune.environments.adapters.independent_checks import compare_answers, is_right
from perilune.environments.adapters.reasoning_gym import from_json
from perilune.errors import WorkFailedError
from perilune.tasks.checks.reward import check_reward
from perilune.verifiers.audit import Audit, audit_reward
from perilune.verifiers.audit.audit import replay_examples

FACTORY = "reward_audit_cases:"


@pytest.fixture(autouse=True)
def _short_deadline(monkeypatch):
    monkeypatch.setattr("perilune.verifiers.audit.audit.ITEM_TIMEOUT_S", 0.5)


def run_audit(scorer, **options):
    section = {"id": "factory", "factory": f"{FACTORY}{scorer}"}
    return audit_reward(section, **({"tasks": 4, "search_budget": 96} | options))


def findings_of(audit):
    return {(finding.probe, finding.what) for finding in audit.findings}


def test_audit_grades_exact_scorer_a():
    audit = run_audit("exact")
    assert audit.grade == "A" and audit.findings == [] and audit.searched > 0
    assert audit.judged > 500


@pytest.mark.parametrize(
    ("scorer", "grade", "probe", "what"),
    [
        ("substring", "F", "answer list", "full reward for a wrong output"),
        ("last_digit", "F", "search", "full reward for a wrong output"),
        ("pays_for_nothing", "F", "empty", "full reward for a wrong output"),
        ("pays_a_little", "B", "empty", "small reward for a wrong output"),
        ("pays_for_length", "F", "very long", "full reward for a wrong output"),
        ("evaluates", "D", "code for gold", "full reward for a wrong output"),
        ("obeys", "F", "prompt injection", "full reward for a wrong output"),
        ("echoes", "F", "prompt echo", "full reward for a wrong output"),
        ("strips_nothing", "B", "padded gold", "no reward for a right answer in another form"),
        ("folds_characters", "B", "lookalike gold", "full reward for a right answer in lookalike characters"),
        ("raises_on_words", "C", "constant", "the scorer fails on a wrong output"),
        ("hangs_on_long", "C", "very long", "the scorer fails on a wrong output"),
        ("refuses_gold", "F", "gold", "no reward for a right answer"),
        ("remembers", "F", "state", "the same output gets another score once it has been scored"),
        ("ignores_the_end", "A", "cut off gold", "full reward for a right answer that was cut off"),
    ],
)
def test_audit_finds_and_grades_each_fault(scorer, grade, probe, what):
    audit = run_audit(scorer)
    assert (probe, what) in findings_of(audit), findings_of(audit)
    assert audit.grade == grade


def test_audit_finds_answer_in_feedback():
    audit = run_audit("tells_after_a_try", tasks=2, search_budget=0)
    (finding,) = [finding for finding in audit.findings if finding.probe == "answer in the feedback"]
    assert (audit.grade, finding.tasks, finding.example.verdict) == ("F", 2, 1.0)
    assert finding.example.transcript.actions == ("0", finding.example.task.data["answer"])
    sound = run_audit("lets_try_again", tasks=2, search_budget=0)
    assert "answer in the feedback" not in {finding.probe for finding in sound.findings}, findings_of(sound)


def test_default_settings_raise_grade_of_hackable_scorer_to_a():
    section = {"id": "reasoning_gym", "task": "syllogism"}
    raw = audit_reward(section | {"threshold": None, "strict": False}, tasks=4, search_budget=48)
    assert raw.grade >= "C" and ("answer list", "partial reward for a wrong output") in findings_of(raw)
    assert audit_reward(section, tasks=4, search_budget=48).grade == "A"


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("puzzle24", "6*8/(2*1)"),
        ("spell_backward", "{gold} or not"),
        ("coin_flip", "0"),
        ("complex_arithmetic", "nan"),
    ],
)
def test_default_settings_give_no_reward_for_known_exploits(family, wrong):
    section = {"id": "reasoning_gym", "task": family}
    shipped = make_environment(section | {"strict": False, "threshold": None})
    task = next(task for task in shipped.tasks("train", 0) if task.data["answer"] not in ("0", "1"))
    wrong = wrong.format(gold=task.data["answer"])
    assert shipped.score(task, Transcript(wrong)).reward == pytest.approx(1.0)
    guarded = make_environment(section)
    assert guarded.score(task, Transcript(wrong)).reward == 0.0
    assert guarded.score(task, guarded.gold(task)).reward == 1.0


def test_audit_is_deterministic_for_seed():
    assert run_audit("last_digit", seed=3).to_json() == run_audit("last_digit", seed=3).to_json()


def test_replay_scores_findings_of_saved_audit(tmp_path):
    audit = run_audit("substring")
    read = Audit.from_json(json.loads(json.dumps(audit.to_json())))
    assert read.grade == audit.grade
    for finding, verdict in replay_examples(read):
        assert verdict == finding.example.verdict


def test_audit_command_saves_findings_and_replay_command_checks_them(tmp_path):
    file = tmp_path / "audit.json"
    command = ["audit", "reasoning_gym/chain_sum", "--set", "strict=false", "--set", "threshold=null"]
    run = CliRunner().invoke(app, [*command, "--tasks", "2", "--search", "24", "--out", str(file)])
    assert run.exit_code == 0 and "lookalike gold" in run.output and "grade" in run.output
    assert CliRunner().invoke(app, ["replay", str(file)], catch_exceptions=False).exit_code == 0

    changed = json.loads(file.read_text())
    changed["findings"][0]["example"]["verdict"] = 0.123
    file.write_text(json.dumps(changed))
    with pytest.raises(WorkFailedError, match="verdicts have changed"):
        CliRunner().invoke(app, ["replay", str(file)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("answer", "stated", "same"),
    [
        ("42", "42", True), (" 42\n", "42", True), ("42.0", "42", True), ("43", "42", False),
        ("1,000", "1000", True), ("2.5000000001", "2.5", True), ("2.52", "2.5", None), ("3.5", "2.5", False),
        ("٤٢", "42", False), ("Yes", "yes", True), ("yes no", "yes", False), ("", "0", False),
        ("nan", "nan", True), ("inf", "1", False), ("[[1,2]]", "[[1, 2]]", None), ("127.9", "127.87°", None),
        ("1 2 4", "1 2 3", False), ("5. 1", "5.0 1", None), ("2:27:48", "02:27:48", None),
    ],
)  # fmt: skip
def test_same_answer_compares_forms_of_answers(answer, stated, same):
    assert compare_answers(answer, stated) is same


WRONG = {
    "countdown": ["", "456", "17*24 - 15 + 63 + 0", "eval('1')", "(" * 5000, "9**9**9"],
    "puzzle24": ["24", "10*(5 + 7)/5*1"],
    "n_queens": ["Q", "_ _\n_ _"],
    "palindrome_generation": ["", "a", "gwicigw"],
    "tower_of_hanoi": ["", "Move disk 1 from Peg 1 to Peg 9", "Move disk 2 from Peg 1 to Peg 2"],
    "simple_integration": ["", "C", "x", "Integral(x, x)", "__import__('os')"],
    "intermediate_integration": ["", "C"],
    "polynomial_multiplication": ["", "0", "z"],
    "cryptarithm": ["", "A=1", "A=1,A=1"],
    "jugs": ["", "[]", '["fill Z"]', '["pour A->A"]'],
    "group_anagrams": ["", "[]", "[[]]"],
    "coin_flip": ["0", "10", "nan", "1e999", "1/0"],
    "complex_arithmetic": ["nan", "inf", "1+2i", "__import__('os')"],
    "fraction_simplification": ["", "1/0", "1/1 or not", "$1/2$ $1/3$"],
    "prime_factorization": ["", "1", "4 x 4", "-1 x -1"],
    "polynomial_equations": ["x", "1e9", "nan"],
}


@pytest.mark.parametrize("family", WRONG)
def test_independent_check_accepts_stated_answer_and_rejects_wrong_ones(family, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    environment = make_environment({"id": "reasoning_gym", "task": family})
    tasks = environment.tasks("train", 0)
    for _ in range(4):
        task = next(tasks)
        facts = {"answer": task.data["answer"], "metadata": from_json(task.data["metadata"])}
        assert is_right(family, task.data["answer"], facts) is True
        assert not any(is_right(family, wrong, facts) for wrong in WRONG[family])


class Run:
    """The part of a workspace that `check_reward` uses."""

    leads = True

    def __init__(self, folder, scorer):
        self.artifacts, self.lines = folder, []
        self.log = self.lines.append
        self.job = SimpleNamespace(environment={"id": "factory", "factory": FACTORY + scorer}, seed=0)


@pytest.mark.parametrize(("scorer", "warned"), [("exact", False), ("pays_for_nothing", True)])
def test_check_reward_logs_warning_for_failing_grade(scorer, warned, tmp_path):
    run = Run(tmp_path, scorer)
    check_reward(run)
    (line,) = run.lines
    assert line.startswith("warning: reward audit: grade F (") == warned
    kept = Audit.from_json(json.loads((tmp_path / "reward_audit.json").read_text()))
    assert kept.grade == ("F" if warned else "A")


def test_check_reward_skips_audit_of_resumed_run(tmp_path):
    run = Run(tmp_path, "pays_for_nothing")
    (tmp_path / "reward_audit.json").write_text("{}")
    check_reward(run)
    assert run.lines == [] and (tmp_path / "reward_audit.json").read_text() == "{}"
