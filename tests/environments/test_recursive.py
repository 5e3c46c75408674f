"""The environment `recursive`: code explores the context, asks start sub-agents, and replays are equal."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from perilune.data.generators import make_teacher
from perilune.data.generators.collection import collect_traces
from perilune.environments import Transcript, make_environment
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Observation, Score, Task
from perilune.errors import RequestError

TASKS = {"id": "oolong", "style": "compact", "lengths": [16], "kinds": ["counting"]}
COMPACT: dict[str, Any] = {
    "id": "recursive",
    "prompt": "compact",
    "turns": 3,
    "sandbox": {"memory_mb": 64, "processes": 1},
    "tasks": TASKS,
}


@pytest.fixture(scope="module")
def environment() -> Iterator[Any]:
    made = make_environment(COMPACT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def deep() -> Iterator[Any]:
    made = make_environment({**COMPACT, "prompt": "natural", "depth": 2, "asks": 5, "calls_per_block": 3})
    yield made
    made.close()


def first_task(environment: Any) -> Task:
    return next(environment.tasks("train", 0))


def play(
    environment: Any, task: Task, own: Sequence[str], answer: Callable[[str, str], str] = lambda *_: "A"
) -> tuple[Observation, list[tuple[str, str]], list[int], Transcript]:
    """Plays the player's actions, and `answer(agent, text)` for its sub-agents.

    Returns the last observation; for each turn (agent, text that it saw), and the number of due turns; and a
    transcript.
    """
    session = environment.reset(task, 0)
    left, seen, due, actions = list(own), [], [], []
    while not session.observation.done and (left or session.observation.due[0].agent):
        turn = session.observation.due[0]
        due.append(len(session.observation.due))
        text = "\n".join(message["content"] for message in turn.messages)
        seen.append((turn.agent, text))
        actions.append(answer(turn.agent, text) if turn.agent else left.pop(0))
        session.step(actions[-1])
    last = session.observation
    session.close()
    return last, seen, due, Transcript(actions[-1], earlier=tuple(actions[:-1]))


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def test_prompt_contains_length_first_lines_and_question(environment: Any, deep: Any) -> None:
    compact = first_task(environment).prompt[0]["content"]
    assert re.fullmatch(r"0000016\n[a-l]\d\w\w\n[a-l]\d\w\w\n\S+\n", compact)
    natural = first_task(deep).prompt[0]["content"]
    assert "80 characters in 16 lines" in natural and "ask_all(questions, contexts)" in natural
    assert "ask" not in make_environment({**COMPACT, "prompt": "natural", "depth": 0}).spec.tasks.id


def test_each_teacher_strategy_is_correct_for_every_kind_of_question() -> None:
    kinds = ["counting", "user", "temporal", "pairs"]
    environment = make_environment({**COMPACT, "tasks": {**TASKS, "kinds": kinds, "users": 5}})
    teacher = make_teacher("recursive", {"lines": 1.0})
    seen = set()
    for task in islice(environment.tasks("train", 1), 40):
        asked = task.data["task"]["question"]
        if (kind := (asked["find"], asked["relation"] if "pairs" in asked["find"] else "")) in seen:
            continue
        seen.add(kind)
        for strategy in ("lines", "whole", "guess"):
            *earlier, last = teacher.script(task, strategy, KeyedRandom(0, task.task_id))  # type: ignore[attr-defined]
            outcome = environment.score(task, Transcript(last, earlier=tuple(earlier)))
            assert isinstance(outcome, Score) and outcome.reward == 1.0, (strategy, task, outcome)
            asks = outcome.metrics["asks"]
            assert asks == {"whole": 1, "guess": 0}.get(strategy, asks) and (asks > 0) == (
                strategy != "guess"
            )
    environment.close()
    assert len({find for find, _ in seen}) >= 7


def test_ask_all_runs_sub_agents_in_parallel_and_returns_answers_in_order(environment: Any) -> None:
    code = "x=ask_all(C.split()[:3]);answer.update(content=','.join(x)+ask('z'),ready=1)"
    task = first_task(environment)
    end, seen, due, transcript = play(environment, task, [code], lambda agent, text: f"<{agent}:{text}>")
    lines = task.data["task"], [text for agent, text in seen if agent]
    assert [agent for agent, _ in seen] == ["", "0", "1", "2", "3"] and due == [1, 3, 2, 1, 1]
    assert lines[1][3] == "z" and end.done and end.metrics["asks"] == 4
    replayed = environment.score(task, transcript)
    assert replayed.reward == end.rewards[0] and replayed.metrics == end.metrics


def test_turns_name_the_asks_whose_answers_they_receive(environment: Any) -> None:
    codes = ["x=ask_all(['y','z']);y=ask('w')", "print(1)", "ask('v');answer['ready']=True"]
    session = environment.reset(first_task(environment), 0)
    received = []
    while not session.observation.done:
        turn = session.observation.due[0]
        received += [] if turn.agent else [turn.results]
        session.step("A" if turn.agent else codes.pop(0))
    assert received == [(), ("0", "1", "2"), ()]  # the code turns the last one into the final answer


def test_agent_that_explores_receives_the_answers_to_its_own_asks(deep: Any) -> None:
    session = deep.reset(first_task(deep), 0)
    session.step(fenced("print(ask('q', 'a\\nb'))"))
    session.step(fenced("print(ask('r'))"))
    session.step("A")
    assert [(turn.agent, turn.results) for turn in session.observation.due] == [("0", ("0.0",))]
    session.step("B")
    session.close()


def test_answer_of_code_is_scored_and_asks_cost_reward() -> None:
    environment = make_environment({**COMPACT, "ask_price": 0.01})
    task = first_task(environment)
    right = task.data["task"]["answer"]
    for content, reward in ((right, 1.0), (right + "0", 0.0)):
        code = f"ask('a');answer['content']={content!r};answer['ready']=True"
        end, *_ = play(environment, task, [code])
        assert end.rewards == (pytest.approx(reward - 0.01),) and end.terms["right"] == reward
        assert end.terms["price"] == pytest.approx(-0.01)
    environment.close()


def test_variables_persist_and_earlier_blocks_print_nothing_again(deep: Any) -> None:
    own = [fenced("n = len(C.split()); print('first')"), fenced("print(n + 1)"), fenced("print(answer)")]
    end, seen, *_ = play(deep, first_task(deep), own)
    assert [text for _, text in seen][1:] == ["first\n", "17\n"]
    assert end.truncated and end.rewards == (0.0,) and end.metrics["blocks"] == 3


def test_errors_are_shown_and_killed_blocks_change_no_variables(deep: Any) -> None:
    own = [fenced("n = 5\nprint(m)"), fenced("n = 6\nwhile True: pass"), "no code"]
    _, seen, *_ = play(deep, first_task(deep), [*own[:2], fenced("print(n)")])
    texts = [text for _, text in seen]
    assert "NameError: name 'm' is not defined" in texts[1] and 'File "block 1", line 2' in texts[1]
    assert "inside" not in texts[1] and texts[2].startswith("[ended: timeout")
    end, seen, *_ = play(deep, first_task(deep), [fenced("n = 6"), own[2], fenced("print(n)")])
    assert seen[2][1] == "error: neither a call nor an <answer>\n" and end.truncated


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("ask(3)", "RuntimeError: ask takes texts"),
        ("ask()", "RuntimeError: ask() missing 1 required positional argument: 'question'"),
        ("ask_all('ab')", "RuntimeError: ask_all takes a list"),
        ("ask_all(['a'], ['b', 'c'])", "RuntimeError: ask_all got 1 questions and 2 contexts"),
        ("ask_all(['a'] * 6)", "RuntimeError: 6 asks are needed, and 5 of 5 are left"),
        ("ask({1})", "TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_invalid_ask_raises_error_in_code(deep: Any, code: str, error: str) -> None:
    caught = f"try: {code}\nexcept Exception as e: print(f'{{type(e).__name__}}: {{e}}')"
    _, seen, *_ = play(deep, first_task(deep), [fenced(caught), "<answer>1</answer>"])
    assert seen[1][1].startswith(error)


def test_code_runs_are_cached_except_timeouts(deep: Any) -> None:
    runner, texts = deep._code, (("C.txt", "abc"),)
    state = {"prelude": "", "texts": {"C": "C.txt"}, "functions": [], "results": []}
    once = json.dumps(state | {"blocks": ["import time; print(time.time_ns())"]})
    assert runner.run(once, texts).output == runner.run(once, texts).output
    slow = json.dumps(
        state | {"blocks": ["import time; print(time.time_ns(), flush=True)\nwhile True: pass"]}
    )
    first_run, second = runner.run(slow, texts), runner.run(slow, texts)
    assert first_run.cause == second.cause == "timeout" and first_run.output != second.output


def test_calls_setting_limits_asks_of_block(deep: Any) -> None:
    own = [fenced("for n in range(4): ask(str(n))"), "<answer>1</answer>"]
    _, seen, *_ = play(deep, first_task(deep), own)
    assert [agent for agent, _ in seen] == ["", "0", "1", "2", ""]
    assert seen[-1][1].startswith("[ended: calls")


def test_code_cannot_catch_interruption_at_ask(deep: Any) -> None:
    code = "try: x = ask('q')\nexcept BaseException: x = 'caught'\nfinally: print('once')\nprint(x)"
    _, seen, *_ = play(deep, first_task(deep), [fenced(code), "<answer>1</answer>"])
    assert seen[-1][1] == "once\nA\n"


def test_equal_questions_are_asked_separately(deep: Any) -> None:
    answers = iter("BCD")
    code = "print(ask('q'), *ask_all(['q', 'q']))"
    _, seen, *_ = play(deep, first_task(deep), [fenced(code), "x"], lambda *_: next(answers))
    assert seen[-1][1] == "B C D\n"


def test_nested_agent_explores_own_context(deep: Any) -> None:
    def answer(agent: str, text: str) -> str:
        return {"0": fenced("answer.update(content=ask(C[:2]) + C[2:], ready=True)"), "0.0": "Z"}[agent]

    code = "answer.update(content=ask('which?', 'abc\\n'), ready=True)"
    end, seen, *_ = play(deep, first_task(deep), [fenced(code)], answer)
    assert [agent for agent, _ in seen] == ["", "0", "0.0"] and seen[2][1] == "ab"
    assert "C is a str of 4 characters in 1 lines" in seen[1][1] and "which?" in seen[1][1]
    assert end.done and end.metrics["agents"] == 1 and end.metrics["blocks"] == 2


def test_forged_sandbox_files_do_not_break_episode(deep: Any) -> None:
    forged = [
        "open('outcome.json', 'w').write('[' * 100000)",
        "import json; json.dump({'call': ['eval', ['1'], {}]}, open('outcome.json', 'w'))",
        "import json; json.dump({'answer': 3}, open('outcome.json', 'w'))",
    ]
    for code in forged:
        end, seen, *_ = play(deep, first_task(deep), [fenced(code), "<answer>1</answer>"])
        assert end.done and seen[1][1] == "(no output)"


def test_depth_0_has_no_ask_function() -> None:
    environment = make_environment({**COMPACT, "prompt": "natural", "depth": 0})
    task = first_task(environment)
    assert "language model" not in task.prompt[0]["content"]
    _, seen, *_ = play(environment, task, [fenced("ask('q')"), "x"])
    assert "NameError: name 'ask' is not defined" in seen[1][1]
    environment.close()


def test_ask_tool_shows_answers_in_context() -> None:
    environment = make_environment({**COMPACT, "tool": "ask", "turns": 4})
    task = first_task(environment)
    (own, *labels, last) = make_teacher("recursive", {"ranges": 1.0}).script(  # type: ignore[attr-defined]
        task, "ranges", KeyedRandom(0, task.task_id)
    )
    asked = iter([labels[0], labels[2]])
    end, seen, *_ = play(environment, task, [own, labels[1], last], lambda *_: next(asked))
    assert (own, labels[1]) == ("1-8", "9-16") and end.rewards == (1.0,)
    assert [agent for agent, _ in seen] == ["", "0", "", "1", ""] and seen[2][1] == f"={labels[0]}\n"
    assert len(seen[1][1].split()) == 8 and end.metrics["strategy/many asks"] == 1.0
    _, seen, *_ = play(environment, task, ["8-", ";1"])
    environment.close()
    assert seen[1][1] == "error: neither lines nor an answer\n"
    natural = make_environment({**COMPACT, "tool": "ask", "prompt": "natural"})
    call = '{"name": "ask", "arguments": {"question": "all?", "first": 2, "last": 3}}'
    actions = [f"<tool_call>{call}</tool_call>", call, "<tool_call>{}</tool_call>"]
    task = first_task(natural)
    assert "Python" not in task.prompt[0]["content"]
    _, seen, *_ = play(natural, task, actions, lambda *_: "AB")
    assert seen[1][1].endswith("\nall?") and len(seen[1][1].split("\n")) == 3
    assert [text for _, text in seen[2:]] == ["AB", "error: neither a call nor an <answer>\n"]


def test_how_to_page_documents_every_key(environment: Any) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "recursive.md"
    heads = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page.read_text(), re.MULTILINE)
    documented = {key for head in heads for key in re.findall(r"\w+", head)}
    assert environment.Spec.model_fields.keys() - {"id", "tasks"} <= documented


def test_traces_contain_record_for_each_distinct_sub_agent_conversation() -> None:
    teacher = make_teacher("recursive", {"lines": 1.0})
    traces = collect_traces(COMPACT, teacher, 6, 0, extra={})
    own = [record for record in traces.kept if not record.agent]
    asked = [record for record in traces.kept if record.agent]
    assert len(own) == 6 and len({record.digest for record in traces.kept}) == len(traces.kept)
    assert 60 < len(asked) <= 96 and all(len(record.messages) == 2 for record in asked)
    assert all(re.fullmatch("[A-F]", record.answer) and len(record.prompt) == 4 for record in asked)


def test_contexts_may_come_from_column_of_jsonl_file(tmp_path: Path) -> None:
    rows = [
        {"prompt": "How many words?", "context": "a b c\n" * n, "answer": f"{3 * n}"} for n in range(1, 60)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"id": "recursive", "tasks": {"id": "jsonl", "path": str(path)}}
    environment = make_environment(section)
    task = first_task(environment)
    assert "How many words?" in task.prompt[0]["content"] and "It begins:\na b c" in task.prompt[0]["content"]
    code = "answer['content'], answer['ready'] = len(C.split()), True"
    end, *_ = play(environment, task, [fenced(code)])
    environment.close()
    assert end.rewards == (1.0,)
    path.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "3"}) + "\n" for n in range(60)))
    with pytest.raises(RequestError, match="no text in the column `context`"):
        first_task(make_environment(section))


def test_tasks_without_contexts_are_rejected() -> None:
    with pytest.raises(RequestError, match="no long contexts"):
        make_environment({**COMPACT, "tasks": {"id": "instructions"}})
    teacher = make_teacher("recursive", {"lines": 1.0})
    natural: Mapping[str, Any] = {**COMPACT, "tasks": {**TASKS, "style": "natural"}}
    with pytest.raises(RequestError, match="compact tasks of oolong"):
        collect_traces(natural, teacher, 1, 0, extra={})
