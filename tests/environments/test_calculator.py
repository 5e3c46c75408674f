"""The calculator environment: its results, its rewards, and the traces of its teacher."""

from itertools import islice

import pytest

from perilune.data.generators import make_teacher, verify_candidates
from perilune.environments import Score, Transcript, make_environment
from perilune.environments.builtin.calculator import calculate
from perilune.environments.core.replay import replay_agent_conversations, replay_conversation
from perilune.models.text.tokenizer import Tokenizer
from perilune.models.text.turns import encode_conversations


@pytest.fixture(scope="module")
def calculator():
    return make_environment({"id": "calculator"})


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("37*48", "1776"), ("0+007", "7"), ("1-1", "?"), ("1+2+3", "?"), ("", "?"), ("2**9", "?"),
        ("٤*2", "?"), ("1+1\n", "?"), ("9" * 13 + "+1", "?"), ("__import__('os')", "?"),
    ],
)  # fmt: skip
def test_calculate_supports_only_addition_and_multiplication(call, result):
    assert calculate(call) == result


def test_calculator_rewards_correct_answer_and_counts_calls(calculator):
    (task,) = islice(calculator.tasks("train", 0), 1)
    answer = task.data["answer"]
    assert answer == str(eval(task.prompt[0]["content"].rstrip("=")))
    first, *_ = task.data["actions"]
    for text, earlier, reward, calls in [
        (f";{answer}", (), 1.0, 0),
        (f";{answer}", (first, "what"), 1.0, 2),
        (f";0{answer}", (first,), 0.0, 1),
        (f"; {answer}", (), 0.0, 0),
        (";", (), 0.0, 0),
    ]:
        score = calculator.score(task, Transcript(text, earlier=earlier))
        assert (score.reward, score.metrics["calls"]) == (reward, calls)
        assert score.metrics[f"strategy/{'calculator' if calls else 'guess'}"] == 1.0
    cut = Transcript(f";{answer}", earlier=(first,), finished=False)
    assert calculator.score(task, cut) == Score(0.0)
    endless = Transcript("1+1", earlier=("1+1",) * 5)
    assert calculator.score(task, endless) == Score(0.0)


def test_calculator_tasks_are_distinct_and_finite():
    small = make_environment({"id": "calculator", "digits": 1})
    train, heldout = ([task.task_id for task in small.tasks(split, 0)] for split in ("train", "heldout"))
    assert len(set(train)) == len(train) > 500 and len(heldout) > 30 and not set(train) & set(heldout)


def test_calculator_teacher_writes_episodes_with_environment_messages(calculator):
    tasks = list(islice(calculator.tasks("train", 0), 60))
    teacher = make_teacher("calculator", {"calculator": 0.5, "guess": 0.5})
    score = lambda pairs: [calculator.score(*pair) for pair in pairs]  # noqa: E731
    converse = lambda *pair: replay_agent_conversations(calculator, *pair)  # noqa: E731
    candidates = teacher.candidates(tasks, 0)
    records = list(verify_candidates(candidates, score, environment="calculator", seed=0, converse=converse))
    assert {record.source for record in records} == {"calculator/calculator", "calculator/guess"}
    plain = Tokenizer.characters()
    for task, record in zip(tasks, records, strict=True):
        assert record.score == 1.0
        if record.source.endswith("guess"):
            assert [message["role"] for message in record.messages] == ["user", "assistant"]
            continue
        roles = [message["role"] for message in record.messages]
        assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
        assert record.messages[2]["content"] == f"={calculate(task.data['actions'][0])}\n"
        turns = (record.messages[:1], record.messages[1:], {})
        ((prompt, ids, mask),) = encode_conversations(plain, [turns])
        learned = plain.decode([token for token, own in zip(ids, mask, strict=True) if own])
        others = plain.decode([token for token, own in zip(ids, mask, strict=True) if not own])
        assert learned == "".join(task.data["actions"])
        assert others == record.messages[2]["content"] + record.messages[4]["content"]
        assert plain.decode(prompt) == task.prompt[0]["content"]


def test_conversation_rejects_actions_after_end(calculator):
    (task,) = islice(calculator.tasks("train", 0), 1)
    answer = task.data["actions"][-1]
    with pytest.raises(ValueError, match="done before action 2"):
        replay_conversation(calculator, task, Transcript(answer, earlier=(answer,)))
