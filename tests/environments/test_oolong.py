"""Generated OOLONG tasks: gold answers match brute force over the text, and scores follow OOLONG."""

import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from perilune.data.generators import make_teacher
from perilune.data.generators.oolong import write_notes
from perilune.environments import Transcript, make_environment
from perilune.environments.builtin.oolong import compact, natural
from perilune.environments.builtin.oolong.natural import LABELS
from perilune.environments.builtin.oolong.questions import Question, compute_answer
from perilune.environments.builtin.oolong.records import Record
from perilune.environments.builtin.oolong.second_opinion import answer_by_reading
from perilune.environments.builtin.oolong.settings import OolongSettings
from perilune.environments.builtin.oolong.tasks import (
    context_lines,
    direct_prompt,
    draw_tasks,
    gold,
    line_labels,
    question,
    score_answer,
)
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.long_context import make_glimpse
from perilune.environments.core.splits import assign_split
from perilune.errors import RequestError
from perilune.verifiers.audit import audit_reward
from perilune.verifiers.conformance import check_environment

ROOT = Path(__file__).parents[2]
LOOSE = ROOT / "examples" / "reward_audit" / "contains_answer.py"
STYLES = ("natural", "compact")


def draw(count, split="train", seed=0, **settings):
    return list(islice(draw_tasks(OolongSettings(**settings), split, seed), count))


def task_data_for(find, style="natural", **settings):
    """The data of the first task with that kind of question."""
    tasks = draw_tasks(OolongSettings(style=style, **settings), "train", 0)
    return next(data for _, data in tasks if data["question"]["find"] == find)


@pytest.mark.thorough
@pytest.mark.parametrize("style", STYLES)
def test_gold_answers_match_brute_force_over_text(style):
    finds = set()
    for lengths, users, count in (((8, 12, 16), 4, 2500), ((24, 32, 40), 8, 2500)):
        for _, data in draw(count, style=style, lengths=lengths, users=users):
            read = answer_by_reading(style, context_lines(data), question(data))
            stated = gold(data)
            if not isinstance(read, str):
                stated = {frozenset(pair.split("-")) for pair in stated.replace(",", " ").split()}
            assert read == stated, (direct_prompt(data), gold(data))
            finds.add((data["question"]["find"], data["question"]["relation"]))
    relations = {relation for find, relation in finds if find.startswith("pairs")}
    assert relations == {"both", "each", "equal", "sum"}
    assert {find for find, _ in finds} == {
        "count", "most", "least", "compare", "user", "month", "pairs", "pairs_count",
    }  # fmt: skip


LINES = [
    Record(101, 1, 0, 0), Record(215, 1, 0, 0), Record(301, 2, 0, 0), Record(320, 2, 1, 0),
    Record(401, 3, 1, 0), Record(402, 3, 1, 0), Record(403, 3, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (Question("count", 0), 4),
        (Question("count", 0, user=1), 2),
        (Question("count", 0, since=215), 3),
        (Question("count", 0, until=215), 1),
        (Question("most"), 0),
        (Question("most", user=3), 1),
        (Question("most", since=300, until=400), None),
        (Question("least"), None),
        (Question("compare", 0, 1), 1),
        (Question("compare", 1, 0), -1),
        (Question("compare", 4, 5), 0),
        (Question("user", 0), 1),
        (Question("user", 5), None),
        (Question("month", 1), 4),
        (Question("month", 0), None),
        (Question("pairs", 0, relation="both", number=1), ((1, 2), (1, 3), (2, 3))),
        (Question("pairs", 0, relation="both", number=2), ()),
        (Question("pairs", 0, 1, relation="each", number=1), ((1, 2), (1, 3), (2, 3))),
        (Question("pairs", 0, 1, relation="each", number=2), ((1, 3),)),
        (Question("pairs", 0, relation="equal", number=1), ((2, 3),)),
        (Question("pairs", 0, relation="equal", number=2), ()),
        (Question("pairs_count", 0, relation="sum", number=3), 2),
        (Question("pairs", 1, relation="sum", number=3, since=400), ()),
    ],
)
def test_evaluate_on_seven_lines(asked, answer):
    assert compute_answer(asked, LINES) == answer


def test_context_is_regenerated_from_small_task_data():
    (_, data), *_ = draw(1, lengths=(5000,))
    again = json.loads(json.dumps(data))
    assert list(context_lines(again)) == list(context_lines(data)) and len(list(context_lines(data))) == 5000
    assert (question(again), gold(again)) == (question(data), gold(data))
    assert len(json.dumps(data)) < 1000


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("users", [8, 1000])
def test_context_has_requested_length_in_tokens(style, users):
    data = draw(1, style=style, users=users, lengths=(20_000,), unit="tokens")[0][1]
    text = "".join(context_lines(data))
    tokens = len(text) if style == "compact" else sum(map(is_token, pieces(text)))
    assert tokens == pytest.approx(20_000, rel=0.06)


def pieces(text):
    """Yields words and all other characters."""
    word = ""
    for character in text:
        if character.isalpha():
            word += character
            continue
        yield word
        yield character
        word = ""


def is_token(piece):
    return piece not in ("", " ")


def test_tasks_mix_lengths_and_kinds():
    tasks = [data for _, data in draw(60, lengths=(16, 64), kinds=("counting",))]
    assert {data["lines"] for data in tasks} == {16, 64}
    assert {data["question"]["find"] for data in tasks} == {"count", "most", "least", "compare"}
    assert all(data["question"]["user"] == 0 and data["question"]["since"] == 0 for data in tasks)


def test_tasks_are_distinct_and_splits_share_no_context():
    ids, texts = {}, {}
    for split in ("train", "heldout"):
        tasks = draw(40, split) + draw(40, split, seed=1)
        ids[split] = {task_id for task_id, _ in tasks}
        texts[split] = {"".join(context_lines(data)) for _, data in tasks}
        assert len(ids[split]) == len(texts[split]) == 80
    assert not ids["train"] & ids["heldout"] and not texts["train"] & texts["heldout"]
    assert draw(5) == draw(5) and draw(5) != draw(5, seed=1)


def test_questions_of_one_context_are_consecutive_and_distinct():
    tasks = draw(50, questions=5)
    assert len({task_id for task_id, _ in tasks}) == 50
    seeds = [data["seed"] for _, data in tasks]
    assert seeds == sorted(seeds, key=seeds.index) and 10 <= len(set(seeds)) <= 12
    assert len({question(data) for _, data in tasks[:4]}) == 4
    assert all(assign_split(task_id) == "heldout" for task_id, _ in draw(20, "heldout", questions=5))
    same, others = dict(draw(40)), dict(draw(40, kinds=("temporal",)))
    assert same.keys() & others.keys() != same.keys()  # the same contexts, and some of the same questions
    assert all(same[task_id] == others[task_id] for task_id in same.keys() & others.keys())


@pytest.mark.parametrize("style", STYLES)
def test_line_labels_give_the_gold_answer(style):
    data = task_data_for("count", style, kinds=("counting",))
    label = (compact if style == "compact" else natural).LABELS[data["question"]["label"]]
    assert str(list(line_labels(data)).count(label)) == gold(data)


def test_users_are_zipf_distributed_and_labels_vary():
    counts = {}
    data = {**draw(1)[0][1], "lines": 20_000, "users": 50, "style": "compact"}
    for line in context_lines(data):
        user = line[1:-3]
        counts[user] = counts.get(user, 0) + 1
    ranked = sorted(counts.values(), reverse=True)
    assert ranked[0] / ranked[1] == pytest.approx(2, rel=0.15)
    assert ranked[0] / ranked[9] == pytest.approx(10, rel=0.25)
    long = [drawn_data for _, drawn_data in draw(40, lengths=(2000,), kinds=("user", "temporal"))]
    most = {data["answer"] for data in long if data["question"]["find"] == "most"}
    assert len(most) >= 4


def test_counts_score_as_in_oolong_and_other_answers_by_equality():
    count = {**task_data_for("count"), "answer": "12"}
    for answer, score in (("12", 1), (" 12\n", 1), ("13", 0.75), ("10", 0.75**2), ("0", 0.75**12)):
        assert score_answer(count, answer) == pytest.approx(score)
    label = {**task_data_for("most"), "answer": "human being"}
    for answer in ("Human being", "human", "human beings", "human being, location", "human being location"):
        assert score_answer(label, answer) == 0
    assert score_answer(label, " human being\n") == 1
    month = {**task_data_for("month"), "answer": "2024-03"}
    assert score_answer(month, "2024-03") == 1 and score_answer(month, "2024-3") == 0


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("1-4, 2-3", 1), ("2-3 4-1", 1), ("3-2,\n1-4", 1), ("1-4", 2 / 3), ("1-4, 2-3, 5-6", 0.8),
        ("1-4, 1-4", 0.5), ("1-4, 4-1, 2-3", 0.8), ("5-6", 0), ("1-4, 2-3.", 0), ("1-4; 2-3", 0),
        ("(1, 4), (2, 3)", 0), ("", 0), ("1-4,, 2-3", 0), ("01-4, 2-3", 0),
    ],
)  # fmt: skip
def test_pairs_score_by_f1_with_repetitions_as_errors(answer, score):
    assert score_answer({**task_data_for("pairs"), "answer": "1-4, 2-3"}, answer) == pytest.approx(score)


HOSTILE = [
    "", " ", "\n", "١٢", "１２", "²",
    "nan", "inf", "-12", "+12", "12.0", "1e1", "012", "1,2", "12 12", "0x0c",
    "1" * 15, "12\u200b", "\u202e12", "1-2\x00", "①", "True", "None",
    "9" * 10**7, " " * 10**7, "1-2," * 10**6,
]  # fmt: skip


@pytest.mark.parametrize("find", ["count", "most", "compare", "user", "month", "pairs", "pairs_count"])
def test_hostile_answers_score_0_quickly(find):
    data = task_data_for(find)
    if find in ("count", "pairs_count", "user"):
        data = {**data, "answer": "12"}
    begin = time.process_time()
    assert not any(score_answer(data, answer) > 1e-9 for answer in HOSTILE)
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("style", STYLES)
def test_single_turn_environment_rewards_only_correct_answer(style):
    environment = make_environment({"id": "oolong", "style": style, "rewards": {"official": 1.0}})
    plain = make_environment({"id": "oolong", "style": style})
    for task in islice(plain.tasks("heldout", 0), 30):
        right = plain.gold(task)
        assert plain.score(task, right).reward == 1.0 == environment.score(task, right).reward
        assert plain.is_right(task, right)
        if style == "natural":
            assert plain.score(task, Transcript(f" **{right.text.capitalize()}**.\n")).reward == 1.0
        assert plain.score(task, replace(right, finished=False)).reward == 0.0
        wrong = Transcript(f"{right.text}1")
        assert plain.score(task, wrong).reward == 0.0 and not plain.is_right(task, wrong)
    nearly = next(task for task in plain.tasks("train", 0) if task.data["question"]["find"] == "count")
    one_more = Transcript(f"{plain.gold(nearly).text[:-1]}{int(plain.gold(nearly).text[-1]) + 1}")
    assert plain.score(nearly, one_more).reward == 0.0
    assert environment.score(nearly, one_more).reward == 0.75


def test_compact_task_fits_256_characters_and_accepts_working():
    environment = make_environment({"id": "oolong", "style": "compact", "lengths": [32]})
    for task in islice(environment.tasks("train", 0), 200):
        assert len(task.prompt[0]["content"]) + len(environment.gold(task).text) <= 256
    right = environment.gold(task).text
    assert environment.score(task, Transcript(f"AABC{right}")).reward == 1.0
    assert environment.score(task, Transcript(f"{right}{right}")).reward == 0.0
    assert environment.score(task, Transcript(right[1:])).reward == 0.0


@pytest.mark.parametrize("strategy", ["worked", "direct"])
def test_oolong_teacher_writes_correct_answers_of_256_characters(strategy):
    environment = make_environment({"id": "oolong", "style": "compact"})
    tasks = list(islice(environment.tasks("train", 0), 200))
    for task, (text,) in ((task, script(task, strategy)) for task in tasks):
        assert environment.score(task, Transcript(text)).reward == 1.0
        assert len(task.prompt[0]["content"]) + len(text) <= 256 or task.data["question"]["find"] == "pairs"
    natural_task = next(make_environment({"id": "oolong"}).tasks("train", 0))
    (text,) = script(natural_task, "direct")
    assert text == natural_task.data["answer"]
    with pytest.raises(RequestError, match="worked"):
        script(natural_task, "worked")


def script(task, strategy):
    return make_teacher("oolong", {strategy: 1.0}).script(task, strategy, KeyedRandom(0, ""))


def test_teacher_notes_cover_relevant_lines():
    records = ["c3du", "c3he", "d1du", "e3fe"]
    lines = [Record(301, 3, 0, 0), Record(302, 3, 1, 0), Record(401, 1, 0, 0), Record(501, 3, 0, 1)]
    assert [compact.render_line(line) for line in lines] == records
    for asked, notes in (
        (Question("count", 0), "ABAA"),
        (Question("most", user=3), "ABA"),
        (Question("compare", 0, 1, since=400), "AA"),
        (Question("user", 0), "3 1 3 "),
        (Question("month", 0), "cde"),
        (Question("pairs", 0, relation="sum", number=3), "3 1 3 "),
        (Question("pairs", 0, 1, relation="each"), "A3B3A1A3"),
    ):
        assert write_notes(asked, lines) == notes


@pytest.mark.parametrize("style", STYLES)
def test_oolong_passes_conformance(style):
    report = check_environment({"id": "oolong", "style": style}, tasks=2)
    assert not report.findings, report.findings


@pytest.mark.parametrize("style", STYLES)
def test_audit_grades_oolong_a(style):
    audit = audit_reward({"id": "oolong", "style": style, "lengths": [16]}, tasks=4, search_budget=48)
    assert audit.grade == "A", audit.findings
    assert audit.searched and not audit.unjudged


def test_audit_finds_loose_scorer_that_rewards_naming_all_labels():
    loose = {"function": "contains_answer.py:contains_answer", "source": LOOSE.read_text(), "format": "text"}
    section = {"id": "oolong", "lengths": [16], "kinds": ["counting"], "rewards": {"paid": loose}}
    audit = audit_reward(section, tasks=6, search_budget=0)
    (finding,) = [finding for finding in audit.findings if finding.probe == "all answers"]
    assert (finding.grade, finding.example.verdict) == ("F", 1.0)
    named = finding.example.transcript.text
    assert sum(label in named for label in LABELS) >= 4 and finding.example.task.data["answer"] in named
    assert score_answer(finding.example.task.data, named) == 0.0
    page = (ROOT / "docs" / "how-to" / "oolong.md").read_text()
    assert LOOSE.read_text().partition("\n\n\n")[2] in page


@pytest.mark.parametrize("wrong", [{"lengths": [4]}, {"lengths": []}, {"kinds": ["speaker"]}, {"users": 1}])
def test_oolong_rejects_invalid_settings(wrong):
    with pytest.raises(RequestError, match=next(iter(wrong))):
        make_environment({"id": "oolong", **wrong})


@pytest.mark.parametrize("style", ["compact", "natural"])
def test_glimpse_matches_whole_context(style: str) -> None:
    environment: Any = make_environment({"id": "oolong", "lengths": [40], "style": style})
    task = next(environment.bare_tasks("train", 0))
    assert task.prompt == () and replace(task, prompt=next(environment.tasks("train", 0)).prompt) == next(
        environment.tasks("train", 0)
    )
    whole, glimpse = make_glimpse(environment.context(task)), environment.glimpse(task)
    assert (glimpse.lines, glimpse.first) == (whole.lines, whole.first) == (40, whole.first)
    assert glimpse.characters() == whole.characters() == len(environment.context(task))
