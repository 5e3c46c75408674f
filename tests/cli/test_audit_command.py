"""`perilune environments audit` of recipes, settings and factories, and the grade in `run --plan`."""

import json

import pytest

from perilune.cli.data.audit import print_grades
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError

FUNCTIONS = r"""
import re

def last_box(prompts, completions, answer, **columns):
    found = [re.findall(r"\\boxed\{([^{}]*)\}", one[0]["content"]) for one in completions]
    return [float(boxes[-1:] == [gold]) for boxes, gold in zip(found, answer)]

def substring(prompts, completions, answer, **columns):
    return [float(gold in one[0]["content"]) for one, gold in zip(completions, answer)]
"""
RECIPE = """\
name: sums
model: {preset: tiny}
environment: {id: jsonl, path: sums.jsonl, match: null, heldout: {share: 0.4}}
rewards: {box: {function: "mine.py:last_box", weight: 2.0}}
stages:
  - {name: base, task: evaluate, checkpoint: model, tasks: 8}
"""
ENVIRONMENT = """
from perilune.environments.core.protocol import Score, Task, Transcript
from perilune.environments.core.single_turn import SingleTurn

class Sums(SingleTurn):
    id = "sums"

    def tasks(self, split, seed):
        for a in range(17, 47):
            yield Task(str(a), ({"role": "user", "content": f"{a} + {a}?"},), {"answer": str(2 * a)})

    def gold(self, task):
        return Transcript(task.data["answer"])

    def score(self, task, transcript):
        return Score(float(transcript.text.strip() == task.data["answer"]))

def make(section):
    return Sums()
"""
QUICK = ("--tasks", "3", "--search", "0")


@pytest.fixture
def folder(tmp_path):
    rows = [{"prompt": f"{a} + {3 * a + 40}?", "answer": str(4 * a + 40)} for a in range(17, 47)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "sums.yaml").write_text(RECIPE)
    return tmp_path


def test_audit_uses_rewards_of_the_recipe_and_plan_shows_the_grade(folder, here):
    before = here("run", "sums.yaml", "--plan")
    assert "reward   not audited: perilune environments audit sums.yaml" in before.stdout

    sound = here("environments", "audit", "sums.yaml", *QUICK)
    assert sound.returncode == 0 and "grade A" in sound.stdout and "\\\\boxed{…}" in sound.stdout
    assert "outputs scored on 3 tasks" in sound.stdout
    assert "reward   grade A on 20" in here("run", "sums.yaml", "--plan").stdout

    # A change of the function, its weight or the data makes another reward.
    change = ("--set", "rewards.box.function=mine.py:substring")
    changed = here("run", "sums.yaml", "--plan", *change)
    assert f"not audited: perilune environments audit sums.yaml {' '.join(change)}" in changed.stdout
    hackable = here("environments", "audit", "sums.yaml", *change, *QUICK)
    assert "grade F" in hackable.stdout
    audits = json.loads(here("run", "sums.yaml", "--plan", "--json", *change).stdout)["reward_audits"]
    assert [audit["grade"] for audit in audits] == ["F"] and "full reward" in audits[0]["worst"]
    (folder / "mine.py").write_text(FUNCTIONS.replace("boxes[-1:]", "boxes[:1]"))
    assert "not audited" in here("run", "sums.yaml", "--plan").stdout
    (folder / "mine.py").write_text(FUNCTIONS)
    with (folder / "sums.jsonl").open("a") as rows:
        rows.write('{"prompt": "1 + 1?", "answer": "2"}\n')
    assert "not audited" in here("run", "sums.yaml", "--plan").stdout


def test_audit_refuses_folder_as_output_before_it_probes(folder, here):
    refused = here("environments", "audit", "sums.yaml", *QUICK, "--out", ".")
    assert refused.returncode == 2 and "is a directory" in refused.stderr and "probes" not in refused.stderr


def test_audit_accepts_rewards_on_the_command_line(folder, here):
    settings = ("--set", "path=sums.jsonl", "--set", "match=null")
    rewards = ("--set", "rewards={box: {function: 'mine.py:last_box'}}")
    audit = here("environments", "audit", "jsonl", *settings, *rewards, *QUICK)
    assert audit.returncode == 0 and "grade A" in audit.stdout, audit.stderr


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("rewards=[1]", "rewards: should be a section"),
        ("rewards={a: {function: 3}}", "rewards.a.function is 3"),
        ("rewards={a: {weight: 1}}", "rewards.a.function is missing"), ("rewards={a: x}", 'rewards.a is "x"'),
        ("rewards={a: {function: 'mine.py:nope'}}", "does not define 'nope'"),
        ("rewards={a: {function: 'mine.py:last_box', wait: 1}}", "rewards.a.wait is not a known key"),
        ("rewards={verifier: 1}", "no verifier of its own"), ("rewards={a: .nan}", "not a finite number"),
        ("a..b=1", "is not KEY=VALUE"), ("=3", "is not KEY=VALUE"), ("match", "is not KEY=VALUE"),
        ("path={1: 2", "not valid YAML"), ("path=1e400", "1e400 is not a finite number"),
        ("path=!!python/name:os", "the tag"), ("path=&a x", ""), ("path.a=3", "'path' is not a section"),
        ("id=[1]", "no environment called [1]"), ("id=none", "no environment called 'none'"),
        ("heldout=3", "heldout"), ("wrong=3", "no field 'wrong'"),
    ],
)  # fmt: skip
def test_audit_refuses_malformed_settings(setting, told, folder, here):
    command = ("--set", "path=sums.jsonl", "--set", "match=null", "--set", setting, *QUICK)
    refused = here("environments", "audit", "jsonl", *command)
    assert refused.returncode == 2 and told in refused.stderr, refused.stderr
    assert "Traceback" not in refused.stderr + refused.stdout


@pytest.mark.parametrize(
    "rewards",
    [[1], {"a": {}}, {"a": {"function": 3}}, {"a": "x"}, {"verifier": True}, {"verifier": float("inf")}],
)
def test_make_environment_refuses_malformed_rewards(rewards):
    with pytest.raises(RequestError, match="rewards"):
        make_environment({"id": "calculator", "rewards": rewards})
    with pytest.raises(RequestError, match="rewards"):
        make_environment({"id": "reasoning_gym", "task": "chain_sum", "rewards": rewards})


def test_factory_environment_needs_a_function(tmp_path, here, monkeypatch):
    (tmp_path / "my_sums.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    for command in ("audit", "show", "sample", "check"):
        refused = here("environments", command, "factory")
        assert refused.returncode == 2 and "factory: module:function" in refused.stderr
    function = ("--set", "factory=my_sums:make")
    audit = here("environments", "audit", "factory", *function, *QUICK)
    assert audit.returncode == 0 and "grade A" in audit.stdout, audit.stderr


def test_plan_lists_unaudited_rewards_once(monkeypatch, capsys):
    graded = {"environment": "tools", "grade": "A", "time": 0, "worst": ""}
    rows = [{"environment": name, "grade": None} for name in ("calculator", "jsonl")] + [graded]
    monkeypatch.setattr("perilune.cli.data.audit.load_grades", lambda _: rows)
    print_grades(None, "perilune environments audit mix.yaml")
    assert capsys.readouterr().out.splitlines() == [
        "  reward   tools: grade A on 1970-01-01: no findings",
        "  reward   not audited (calculator, jsonl): perilune environments audit mix.yaml",
    ]


def test_audit_refuses_recipe_without_environment(tmp_path, here):
    (tmp_path / "game.yaml").write_text("name: game\nstages: [{name: play, task: connect_four}]\n")
    refused = here("environments", "audit", "game.yaml")
    assert refused.returncode == 2 and "has no environment" in refused.stderr
