"""Answer formats: parse finds written answers and rejects ambiguous ones."""

import time

import pytest

from perilune.environments.core.answer_format import FORMATS

TEXTS = ("7", "-12", "a b", 'say "hi"', "x^{2}", "[1, 2]", "\\frac{1}{2}")
ANSWERS = {name: ("7", "-12") if name == "last_number" else TEXTS for name in FORMATS}


@pytest.mark.parametrize("name, answer", [(name, answer) for name in FORMATS for answer in ANSWERS[name]])
def test_parse_finds_written_answer(name: str, answer: str) -> None:
    form = FORMATS[name]
    assert form.parse(form.write(answer)) == answer
    assert form.parse(f"{'Let me see.' if name != 'after_think' else ''}\n{form.write(answer)}\n") == answer


@pytest.mark.parametrize(
    "name, text, answer",
    [
        ("answer_tags", "<answer>7", None),  # not closed
        ("answer_tags", "7</answer>", None),
        ("answer_tags", "<answer></answer>", None),
        ("answer_tags", "<answer> \n</answer>", None),
        ("answer_tags", "<answer>7</answer> or <answer>8</answer>", None),
        ("answer_tags", "<answer>7</answer>, so <answer> 7 </answer>", "7"),
        ("answer_tags", "<answer><answer>7</answer></answer>", None),
        ("answer_tags", "<answer>7</answer></answer>", None),
        ("answer_tags", "<think><answer>6</answer></think><answer>7</answer>", "7"),
        ("answer_tags", "<answer>7</answer></think>", None),
        ("answer_tags", "<ANSWER>7</ANSWER>", None),
        ("boxed", "\\boxed{7} \\boxed{8}", None),
        ("boxed", "\\boxed{7", None),
        ("boxed", "\\boxed{7} and \\boxed{7", None),
        ("boxed", "\\boxed{\\boxed{7}}", None),
        ("boxed", "\\boxed{}", None),
        ("boxed", "$\\boxed{\\frac{1}{2}}$", "\\frac{1}{2}"),
        ("boxed", "\\boxed{a\\}b}", "a\\}b"),
        ("json", '{"answer": 7}', "7"),
        ("json", 'So: ```json\n{"work": {"answer": 6}, "answer": "7"}\n```', "7"),
        ("json", '{"answer": 7, "answer": 8}', None),
        ("json", '{"answer": 7} {"answer": 8}', None),
        ("json", '{"answer": {"answer": 8}}', '{"answer": 8}'),
        ("json", '{"answer": null}', None),
        ("json", '{"answer": NaN}', None),
        ("json", '{"result": 7}', None),
        ("json", "\\frac{1}{2} + " * 300 + '{"answer": 7}', "7"),
        ("json", "{answer: 7}", None),
        ("json", '{x} {"answer": true}', "true"),
        ("last_number", "3 + 4 = 7.", "7"),
        ("last_number", "It is 1,000", "1000"),
        ("last_number", "+7", "7"),
        ("last_number", "seven", None),
        ("last_number", "**7**\n", "7"),
        ("last_number", "Step 7:", None),
        ("last_number", "7 or not", None),
        ("last_number", "--7", None),
        ("last_number", "<think>9</think>", None),
        ("after_think", "9 is odd</think> 7 ", "7"),
        ("after_think", "7", None),
        ("after_think", "</think>", None),
        ("after_think", "a</think>7</think>8", None),
        ("after_think", "a</think><think>7", None),
    ],
)
def test_parse_rejects_ambiguous_answers(name: str, text: str, answer: str | None) -> None:
    assert FORMATS[name].parse(text) == answer


@pytest.mark.parametrize("name", FORMATS)
def test_parse_finds_no_answer_in_instruction(name: str) -> None:
    form = FORMATS[name]
    quoted = form.distinct_answers(form.instruction)
    assert form.parse(form.instruction, quoted) is None
    if form.before and name != "after_think":
        assert quoted == {"your answer"}
        assert form.parse(f"{form.instruction} {form.write('7')}", quoted) == "7"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "unit", ["<answer>", "\\boxed{", "{", '{"a":', '{"answer":', '{"answer": 1}', "1", "-", "</think>", "9 "]
)
def test_parse_handles_hostile_texts_quickly(name: str, unit: str) -> None:
    text = unit * (100_000 // len(unit))
    began = time.process_time()
    FORMATS[name].parse(text)
    assert time.process_time() - began < 30  # quadratic scans take minutes
