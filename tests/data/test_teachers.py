"""Teachers and verification of their candidates: strategy shares, determinism, and reasons of rejections."""

from collections import Counter
from itertools import count, islice

import pytest

from perilune.data.generators import (
    Candidate,
    Rejected,
    make_teacher,
    teacher_candidates,
    teacher_names,
    verify_candidates,
)
from perilune.data.records import TraceRecord, deduplicate
from perilune.environments import (
    Failure,
    MultiTurn,
    Score,
    Task,
    Transcript,
    ask,
    end_episode,
    make_environment,
)
from perilune.errors import RequestError
from perilune.verifiers import Scorer


def gym(task, **fields):
    return {"id": "reasoning_gym", "task": task, "prompt": "compact", **fields}


SUMS = {"operators": ["+"], "allow_parentheses": False, "allow_negation": False}
SPECS = {
    "addition": gym("basic_arithmetic", config=SUMS | {"min_terms": 2, "max_terms": 2}),
    "three terms": gym("basic_arithmetic", config=SUMS | {"min_terms": 3, "max_terms": 3}),
    "chain sums": gym("chain_sum", config={"allow_negation": True}),
    "products": gym("products", config={"max_terms": 3, "max_digits": 3}),
}


def score_in_process(environment):
    return lambda pairs: [environment.score(task, transcript) for task, transcript in pairs]


@pytest.mark.parametrize("name", SPECS)
def test_arithmetic_traces_pass_verifier_with_valid_working(name):
    environment = make_environment(SPECS[name])
    teacher = make_teacher("arithmetic", {"scratchpad": 0.4, "brief": 0.3, "direct": 0.3})
    candidates = teacher.candidates(islice(environment.tasks("train", 0), 150), 0)
    rows = list(
        verify_candidates(candidates, score_in_process(environment), environment=environment.id, seed=0)
    )
    assert len(rows) == 150 and all(isinstance(row, TraceRecord) for row in rows)
    tasks = {task.task_id: task for task in islice(environment.tasks("train", 0), 150)}
    assert {row.source for row in rows} == {f"arithmetic/{s}" for s in ("scratchpad", "brief", "direct")}
    for row in rows:
        transcript = row.messages[-1]["content"]
        outcome = environment.score(
            tasks[row.task_id], type(environment.gold(tasks[row.task_id]))(transcript)
        )
        strategy = row.source.rpartition("/")[2]
        assert outcome.metrics[f"strategy/{strategy}"] == 1.0
        assert outcome.metrics.get("trace_valid") == (None if strategy == "direct" else 1.0)


def test_teacher_keeps_strategy_shares_and_depends_on_seed():
    environment = make_environment(SPECS["addition"])
    teacher = make_teacher("arithmetic", {"scratchpad": 0.4, "direct": 0.6})
    tasks = list(islice(environment.tasks("train", 0), 3000))
    first = list(teacher.candidates(tasks, 0))
    shares = Counter(candidate.source for candidate in first)
    assert abs(shares["arithmetic/scratchpad"] / 3000 - 0.4) < 0.04
    assert set(shares) == {"arithmetic/scratchpad", "arithmetic/direct"}
    assert first == list(teacher.candidates(tasks, 0))
    assert first != list(teacher.candidates(tasks, 1))
    part = list(teacher.candidates(tasks[500:600], 0))
    assert part == first[500:600]  # a task's strategy does not depend on the other tasks


def test_arithmetic_trace_matches_documented_format():
    environment = make_environment(SPECS["addition"])
    for task in environment.tasks("train", 0):
        a, b = task.prompt[-1]["content"].removesuffix("=").split("+")
        if len(a) == len(b) == 1:
            break
    column = f"{a}{b}0{int(a) + int(b):02d}"
    answer = f";{int(a) + int(b)}"
    for strategy, expected in {
        "scratchpad": column + answer,
        "brief": column[-2:] + answer,
        "direct": answer,
    }.items():
        (candidate,) = make_teacher("arithmetic", {strategy: 1.0}).candidates([task], 0)
        assert candidate.text == expected


def test_gold_teacher_answers_families_with_stated_answers():
    for family, prompt in (("sudoku", "original"), ("gcd", "compact")):
        environment = make_environment(gym(family) | {"prompt": prompt})
        candidates = make_teacher("gold").candidates(islice(environment.tasks("train", 0), 5), 0)
        rows = verify_candidates(
            candidates, score_in_process(environment), environment=environment.id, seed=0
        )
        assert all(isinstance(row, TraceRecord) for row in rows)


def test_verify_candidates_gives_reason_for_each_rejection():
    environment = make_environment(SPECS["addition"])
    right, wrong, broken, again = islice(environment.tasks("train", 0), 4)
    candidates = [
        Candidate(right, environment.gold(right).text, "t"),
        Candidate(wrong, ";1x", "t"),
        Candidate(broken, "", "t"),
        Candidate(right, environment.gold(right).text, "t"),
        Candidate(again, environment.gold(again).text, "t"),
    ]

    def score(pairs):
        outcomes = score_in_process(environment)(pairs)
        return [
            Failure("verifier", "hung") if task is broken else o
            for (task, _), o in zip(pairs, outcomes, strict=True)
        ]

    rows = list(verify_candidates(candidates, score, environment=environment.id, seed=5))
    kept = [row for row in rows if isinstance(row, TraceRecord)]
    assert [row.task_id for row in kept] == [right.task_id, again.task_id]
    assert {row.seed for row in kept} == {5}
    assert [row.reason for row in rows if isinstance(row, Rejected)] == [
        "score 0 is below 1",
        "verifier: hung",
        "duplicate",
    ]
    assert list(deduplicate(kept)) == kept


def test_keep_from_accepts_partial_scores():
    environment = make_environment(SPECS["addition"])
    (task,) = islice(environment.tasks("train", 0), 1)
    candidate = Candidate(task, ";1", "t", keep_from=0.5)
    rows = verify_candidates([candidate], lambda pairs: [Score(0.5)], environment="e", seed=0)
    assert [row.score for row in rows] == [0.5]


def test_verify_candidates_with_scorer_matches_in_process_result():
    environment = make_environment(SPECS["chain sums"])
    tasks = list(islice(environment.tasks("train", 0), 700))
    teacher = make_teacher("arithmetic")
    here = list(
        verify_candidates(
            teacher.candidates(tasks, 0), score_in_process(environment), environment=environment.id, seed=0
        )
    )
    with Scorer(SPECS["chain sums"]) as scorer:
        there = list(
            verify_candidates(teacher.candidates(tasks, 0), scorer.score, environment=environment.id, seed=0)
        )
    assert here == there


@pytest.mark.parametrize(
    ("name", "strategies", "where", "hint"),
    [
        ("aritmetic", {}, "teacher", "did you mean 'arithmetic'?"),
        ("arithmetic", {"scratchpat": 1.0}, "strategies.scratchpat", "did you mean 'scratchpad'?"),
        ("arithmetic", {"scratchpad": 0.5}, "strategies", ""),
        ("arithmetic", {"scratchpad": "50%"}, "strategies.scratchpad", "scratchpad=0.5"),
        ("arithmetic", {"scratchpad": 1.5, "direct": -0.5}, "strategies", ""),
    ],
)
def test_make_teacher_rejects_unknown_names_and_invalid_shares(name, strategies, where, hint):
    with pytest.raises(RequestError) as caught:
        make_teacher(name, strategies)
    assert caught.value.where == where and hint in caught.value.remedy


def test_make_teacher_uses_default_strategies():
    assert {"arithmetic", "calculator", "gold", "open_spiel"} <= set(teacher_names())
    assert make_teacher("arithmetic").shares == {"scratchpad": 0.4, "direct": 0.6}
    assert make_teacher("gold").shares == {"direct": 1.0}


def test_careless_trace_has_correct_answer_and_one_wrong_digit():
    environment = make_environment(SPECS["three terms"])
    tasks = list(islice(environment.tasks("train", 0), 300))
    careful = make_teacher("arithmetic", {"scratchpad": 1.0}).candidates(tasks, 0)
    careless = make_teacher("arithmetic", {"careless": 1.0}).candidates(tasks, 0)
    places = Counter()
    for task, right, wrong in zip(tasks, careful, careless, strict=True):
        different = [i for i, (a, b) in enumerate(zip(right.text, wrong.text, strict=True)) if a != b]
        assert len(different) == 1 and wrong.text[different[0]].isdigit()
        places[different[0]] += 1
        outcome = environment.score(task, Transcript(wrong.text))
        assert (outcome.reward, outcome.metrics["trace_valid"]) == (1.0, 0.0)
    assert len(places) > 15  # anywhere


def step_candidates(environment, count=40):
    teacher = make_teacher("arithmetic", {"steps": 1.0})
    return list(islice(teacher_candidates(teacher, environment, 0), count))


@pytest.mark.parametrize(
    ("prompting", "last"),
    [({}, "<answer>{}</answer>"), ({"prompting": {"format": "boxed"}}, "\\boxed{{{}}}")],
)
def test_steps_trace_contains_correct_equations_and_answer(prompting, last):
    config = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2}
    environment = make_environment(
        {"id": "reasoning_gym", "task": "chain_sum", "config": config, **prompting}
    )
    for candidate in step_candidates(environment):
        *lines, final = candidate.text.split("\n")
        for line in lines:
            left, right = line.split(" = ")
            a, sign, b = left.split(" ")
            assert int(a) + int(b) * (1 if sign == "+" else -1) == int(right)
        assert lines[-1].endswith(f" = {candidate.task.data['answer']}")
        assert last.format(candidate.task.data["answer"]) in final
        assert environment.score(candidate.task, candidate.transcript).reward == 1.0


def test_teacher_rejects_strategy_of_other_prompt_setting():
    with pytest.raises(RequestError, match="no strategy 'steps' for `prompt: compact`"):
        step_candidates(make_environment(SPECS["three terms"]), 1)
    original = make_environment({"id": "reasoning_gym", "task": "chain_sum"})
    with pytest.raises(RequestError, match="no strategy 'scratchpad' for `prompt: original`"):
        list(islice(teacher_candidates(make_teacher("arithmetic"), original, 0), 40))


def test_arithmetic_teacher_rejects_other_families():
    environment = make_environment(gym("gcd"))
    with pytest.raises(RequestError, match="cannot compute"):
        list(make_teacher("arithmetic").candidates(islice(environment.tasks("train", 0), 1), 0))


class Stated(MultiTurn):
    """States its answers through `gold` only, or has no answers."""

    id, max_turns = "stated", 2

    def __init__(self, section):
        self.states = section["states"]

    def tasks(self, split, seed):
        yield from (Task(str(number), ({"role": "user", "content": "?"},), {}) for number in count())

    def play(self, task, rng):
        first = yield ask()
        second = yield ask("again")
        yield end_episode(float(first + second == "ab"))

    def gold(self, task):
        return Transcript("b", earlier=("a",)) if self.states else None


def test_gold_teacher_plays_multi_turn_gold_and_fails_without_gold():
    teacher = make_teacher("gold")
    candidate = next(teacher_candidates(teacher, Stated({"states": True}), 0))
    assert Stated({"states": True}).score(candidate.task, candidate.transcript).reward == 1.0
    with pytest.raises(RequestError, match="no answer to 10,000 tasks in a row"):
        next(teacher_candidates(teacher, Stated({"states": False}), 0))
