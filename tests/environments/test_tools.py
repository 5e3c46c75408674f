"""Tasks with tools: rewards, tool messages, and protection against reward forgery by the policy's code."""

from itertools import islice

import pytest

from perilune.data.generators import make_teacher, verify_candidates
from perilune.environments import Failure, Score, Transcript, make_environment
from perilune.environments.builtin.tool_calls import Answer, Call, InvalidAction, read_action
from perilune.environments.builtin.tool_tasks import FAMILIES, matches_expected
from perilune.environments.core.replay import replay_agent_conversations, replay_conversation
from perilune.errors import RequestError
from perilune.verifiers import Scorer
from perilune.verifiers.conformance import check_environment

pytestmark = pytest.mark.usefixtures("walls")


@pytest.fixture(scope="module")
def tools():
    environment = make_environment({"id": "tools", "sandbox": {"seconds": 2.0}})
    yield environment
    environment.close()


@pytest.fixture(scope="module")
def by_family(tools):
    tasks = {}
    for task in tools.tasks("train", 0):
        tasks.setdefault(task.data["family"], task)
        if len(tasks) == len(FAMILIES):
            return tasks
    raise AssertionError


def block(code):
    return f"```python\n{code}\n```"


def transcript(task, *code, answer=None):
    text = task.data["answer"] if answer is None else answer
    return Transcript(f"<answer>{text}</answer>", earlier=tuple(map(block, code)))


@pytest.mark.parametrize("compact", [False, True])
def test_read_action_reads_calls_and_answers(compact):
    read = lambda text: read_action(text, compact=compact)  # noqa: E731
    if compact:
        assert read(";42") == Answer("42") and read("print(1)") == Call("python", {"code": "print(1)"})
        return
    assert read("so\n```python\nprint(1)\n```\nand <answer>1</answer>") == Call(
        "python", {"code": "print(1)\n"}
    )
    assert read("```\n<answer>1</answer>\n```") == Call("python", {"code": "<answer>1</answer>\n"})
    assert read("<answer>1</answer> no, <answer> 2\n</answer>") == Answer("2")
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>'
    assert read(call) == Call("read_file", {"path": "a"})
    assert read('<tool_call>{"name": "list_files"}</tool_call>') == Call("list_files", {})
    data, code = '```json\n{"a": 1}\n```', "```python\nprint(1)\n```"
    assert read(f"{data}\n{code}") == read(code) and read(f"{data}\n{call}") == read(call)
    assert read(f"{data} <answer>1</answer>") == Answer("1")
    assert read(f"```json\n{call}\n```\n{code}") == read(call)
    assert read(f"```json\nunclosed\n{code}") == read(code)


@pytest.mark.parametrize(
    "text",
    [
        "", "hello", "<answer>1", "```python\nprint(1)", "<tool_call>{}</tool_call>",
        "<tool_call>[]</tool_call>", '<tool_call>{"name": "rm"}</tool_call>',
        '<tool_call>{"name": "read_file", "arguments": 1}</tool_call>',
        '<tool_call>{"name": "read_file", "arguments": {"path": 1}}</tool_call>',
        '<tool_call>{"name": ["python"]}</tool_call>', f"<tool_call>{'[' * 100_000}</tool_call>",
        '<tool_call>{"name": "read_file", "arguments": {"path": "a", "x": "y"}}</tool_call>',
    ],
)  # fmt: skip
def test_read_action_rejects_malformed_calls(text):
    assert isinstance(read_action(text, compact=False), InvalidAction)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_rewards_only_its_solution(family):
    environment = make_environment({"id": "tools", "task": family})
    try:
        for task in islice(environment.tasks("train", 3), 4):
            assert environment.score(task, environment.gold(task)).reward == 1.0
            untouched = environment.score(task, transcript(task))
            needs_work = bool(task.data["outputs"] or task.data["function"])
            assert untouched.reward == float(not needs_work)
            assert environment.score(task, transcript(task, answer="0.5")).reward == 0.0
    finally:
        environment.close()


@pytest.mark.parametrize("section", [{}, {"task": "figure", "prompt": "compact", "turns": 2}])
def test_tools_environment_passes_conformance(section):
    assert not check_environment({"id": "tools", **section}, tasks=1).findings


CHEATS = {
    "a solution that answers in the checker's name": """
import json, sys, os
json.dump([True] * 12, open('results.json', 'w'))
print('results.json'); sys.exit(0)
""",
    "a module in the checker's way": """
open('json.py', 'w').write("dump = load = lambda *a: None")
open('results.json', 'w').write('[]')
open('solution.py', 'w').write('from json import *')
""",
    "a function that leaves": "open('solution.py', 'w').write('import os\\nos._exit(0)')",
    "a function equal to everything": """
open('solution.py', 'w').write('''
import json
class Same(list):
    __eq__ = lambda self, other: True
    __hash__ = None
def any_name(*a): return Same()
def __getattr__(name): return any_name
json.dumps = lambda *a, **k: "true"
''')
""",
    "looks for what is expected": """
open('solution.py', 'w').write('''
import gc, json, sys
def __getattr__(name):
    def found(*a):
        frame = sys._getframe(1)
        while frame:
            for value in frame.f_locals.values():
                if isinstance(value, dict) and "expected" in value: return value["expected"]
            frame = frame.f_back
        for one in gc.get_objects():
            if isinstance(one, dict) and "expected" in one: return one["expected"]
    return found
''')
""",
    "prints an answer's mark": "print('<answer>done</answer>')",
    "imports the environment": "import perilune.environments.builtin.tool_tasks as t; print(t.FAMILIES)",
    "waits for the clock": "import time; time.sleep(60)",
}


@pytest.mark.parametrize(
    ("family", "cheat"),
    [*(("repair", cheat) for cheat in CHEATS), ("transform", "prints an answer's mark"),
     ("transform", "a module in the checker's way")],
)  # fmt: skip
def test_policy_code_cannot_forge_reward(tools, by_family, cheat, family):
    score = tools.score(by_family[family], transcript(by_family[family], CHEATS[cheat]))
    assert isinstance(score, Score) and score.reward == 0.0


def test_correct_function_is_rewarded_despite_side_effects(tools, by_family):
    """Only results count. Printed text, patched modules and leftover files do not matter."""
    task = by_family["repair"]
    code = task.data["solution"] + "\nopen('solution.py', 'a').write('\\nprint(1)\\nimport json; json.x = 1')"
    assert tools.score(task, transcript(task, code)).reward == 1.0


def test_files_but_not_variables_persist_between_turns(tools, by_family):
    task = by_family["figure"]
    code = ["x = 1; open('kept', 'w').write('1')", "print(open('kept').read(), 'x' in globals())"]
    *_, reply, _ = replay_conversation(tools, task, transcript(task, *code))
    assert reply == {"role": "tool", "content": "1 False\n"}
    score = tools.score(task, transcript(task, *code))
    assert (score.reward, score.metrics) == (1.0, {"strategy/tools": 1.0, "calls": 2.0})


def test_file_tools_list_read_and_write(tools, by_family):
    task = by_family["figure"]
    (name,) = task.data["files"]
    calls = [
        '{"name": "write_file", "arguments": {"path": "d/b", "text": "{x}\\n"}}', '{"name": "list_files"}',
        '{"name": "read_file", "arguments": {"path": "d/b"}}',
        '{"name": "read_file", "arguments": {"path": "none"}}',
        '{"name": "write_file", "arguments": {"path": "/etc/b", "text": ""}}',
    ]  # fmt: skip
    earlier = tuple(f"<tool_call>{call}</tool_call>" for call in calls)
    messages = replay_conversation(tools, task, Transcript("<answer>1</answer>", earlier=earlier))
    replies = [message["content"] for message in messages if message["role"] == "tool"]
    listed = "\n".join(sorted(["d/b", name]))
    assert replies[:4] == ["4 characters written\n", listed, "{x}\n", "error: no such file"]
    assert "Read-only file system" in replies[4] or "Permission denied" in replies[4]


def test_stopped_code_is_shown_and_counted_in_metrics(tools, by_family):
    task = by_family["figure"]
    code = ["while True: pass", "x = bytearray(10**10)", "for i in range(10_000): print('line', i)"]
    replies = [
        message["content"]
        for message in replay_conversation(tools, task, transcript(task, *code))
        if message["role"] == "tool"
    ]
    assert replies[0] == "[ended: timeout]\n" and replies[1].endswith("MemoryError\n[ended: memory]\n")
    assert "bytes were cut" in replies[2] and len(replies[2]) < 2100
    metrics = tools.score(task, transcript(task, *code)).metrics
    assert metrics == {
        "strategy/tools": 1.0, "calls": 3.0, "contained/timeout": 1.0, "contained/memory": 1.0
    }  # fmt: skip


def test_score_twice_reports_different_output(by_family):
    task = by_family["figure"]
    steady, unsteady = (transcript(task, code) for code in ("print(1)", "import os; print(os.urandom(8))"))
    twice = make_environment({"id": "tools", "sandbox": {"twice": True}})
    assert twice.score(task, unsteady).metrics["unsteady"] == 1.0
    assert "unsteady" not in twice.score(task, steady).metrics
    twice.close()


def test_sandbox_error_is_failure_with_sandbox_boundary(tools, by_family, monkeypatch):
    task = by_family["figure"]
    with Scorer({"id": "tools", "sandbox": {"processes": 1}}) as scorer:
        (score,) = scorer.score([(task, transcript(task, "print(1)"))])
        assert score.reward == 1.0
    import perilune.sandbox.mechanisms as mechanisms

    monkeypatch.setitem(mechanisms.WALLS, "moat", ("keeps all out", ("water",)))
    dry = make_environment({"id": "tools"})
    failure = dry.score(task, transcript(task, "print(1)"))
    dry.close()
    assert isinstance(failure, Failure) and failure.boundary == "sandbox" and "lacks walls" in failure.reason


@pytest.mark.parametrize(
    ("content", "right"),
    [(b"[1, 2]", True), (b"[1,2]\n", True), (b"[1.0, 2]", False), (b"[true, 2]", False), (b"", False),
     (b"\xff", False), (b"[" * 100_000, False), (b"NaN", False)],
)  # fmt: skip
def test_json_files_are_compared_by_value(content, right):
    assert matches_expected([1, 2], "x.json", content) is right


def test_csv_files_are_compared_by_rows():
    expected = [["item", "amount"], ["a", "1"]]
    assert matches_expected(expected, "x.csv", b"item,amount\r\na,1\r\n") and matches_expected(
        expected, "x.csv", b'"item",amount\na,1\n\n'
    )
    assert not matches_expected(expected, "x.csv", b"item,amount\na,1\nb,2\n") and not matches_expected(
        expected, "x.csv", b"\0"
    )
    assert not matches_expected(1, "a.json", b"true")


def test_only_figure_family_has_compact_prompt():
    with pytest.raises(RequestError, match="only the family figure has a compact prompt"):
        make_environment({"id": "tools", "prompt": "compact"})


def test_tools_teacher_writes_correct_episodes():
    environment = make_environment({"id": "tools", "task": "figure", "prompt": "compact"})
    tasks = list(islice(environment.tasks("train", 0), 24))
    teacher = make_teacher("tools", {"solve": 0.4, "careful": 0.3, "guess": 0.3})
    records = list(
        verify_candidates(
            teacher.candidates(tasks, 0), lambda pairs: [environment.score(*pair) for pair in pairs],
            environment=environment.id, seed=0,
            converse=lambda *pair: replay_agent_conversations(environment, *pair),
        )
    )  # fmt: skip
    environment.close()
    assert {record.source for record in records} == {"tools/solve", "tools/careful", "tools/guess"}
    assert all(record.score == 1.0 for record in records) and len(records) == 24
    turns = {"tools/guess": 2, "tools/solve": 4, "tools/careful": 6}
    assert all(len(record.messages) == turns[record.source] for record in records)


def test_tools_teacher_does_not_guess_files(by_family):
    teacher = make_teacher("tools", {"guess": 1.0})
    sources = {item.task.data["family"]: item.source for item in teacher.candidates(by_family.values(), 0)}
    solved = {"clean", "transform", "repair"}
    assert sources == {name: f"tools/{'solve' if name in solved else 'guess'}" for name in by_family}
