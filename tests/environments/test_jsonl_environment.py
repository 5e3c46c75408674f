"""Tasks in JSON Lines files: splits, invalid rows, match rules, and the copy in a bundle."""

import gzip
import json
import logging
import shutil
import tracemalloc

import pytest

from perilune.bundle.freeze import freeze
from perilune.bundle.workspace import Workspace
from perilune.environments import Failure, Transcript, make_environment
from perilune.environments.builtin.jsonl_index import HeldOut, load_index
from perilune.environments.core.matching import find_last_number, matches
from perilune.errors import RequestError
from perilune.recipe.load import load_recipe
from perilune.recipe.schema import build_job
from perilune.recipe.staging import stage_files
from perilune.verifiers.audit.audit import audit_reward
from perilune.verifiers.conformance import check_environment
from perilune.verifiers.scorer import Scorer


def rows(count, start=0):
    return [
        {"prompt": f"What is {n} + {n}?", "answer": 2 * n, "level": n % 3}
        for n in range(start, start + count)
    ]


def write_rows(path, some):
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return {"id": "jsonl", "path": str(path), "match": "number"}


@pytest.fixture
def section(tmp_path):
    return write_rows(tmp_path / "sums.jsonl", rows(200, start=100))


def test_jsonl_environment_passes_conformance(section):
    report = check_environment(section, tasks=2)
    assert not report.findings
    assert report.checked["the gold answer is accepted"] == 2


def test_path_is_relative_to_working_directory(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not check_environment(section | {"path": "sums.jsonl"}, tasks=1).findings


def test_every_row_is_in_one_split_for_every_seed(section):
    environment = make_environment(section)
    train, held_out = (
        [task.task_id for task in environment.tasks(split, 3)] for split in ("train", "heldout")
    )
    assert len(set(train) | set(held_out)) == len(train) + len(held_out) == 200
    assert 5 < len(held_out) < 40  # a tenth
    other = [task.task_id for task in environment.tasks("train", 4)]
    assert sorted(other) == sorted(train) and other != train
    task = next(environment.tasks("train", 0))
    assert task.data["level"] in (0, 1, 2) and task.data["answer"].isdigit()


@pytest.mark.parametrize(
    ("rule", "what"),
    [({"value": "dev"}, "without column"), ({"share": 0.2, "column": "split"}, "choose one")],
)
def test_held_out_rule_without_effect_is_refused(section, rule, what):
    with pytest.raises(RequestError, match=what):
        make_environment(section | {"heldout": rule})


def test_heldout_rows_come_from_column_or_file(tmp_path, section):
    marked = [row | {"split": "test" if n < 4 else "train"} for n, row in enumerate(rows(10))]
    by_column = write_rows(tmp_path / "marked.jsonl", marked) | {"heldout": {"column": "split"}}
    assert make_environment(by_column).settings() == {"train": 6, "heldout": 4}
    write_rows(tmp_path / "kept.jsonl", rows(5, start=1000))
    by_file = section | {"heldout": {"path": str(tmp_path / "kept.jsonl")}}
    assert make_environment(by_file).settings() == {"train": 200, "heldout": 5}
    write_rows(tmp_path / "kept.jsonl", rows(5, start=103))
    with pytest.raises(RequestError, match=r"sums.jsonl:4: has the same prompt as .*kept.jsonl:1"):
        make_environment(by_file)


def test_folder_path_reads_all_files(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_rows(folder / "a.jsonl", rows(20))
    section = write_rows(folder / "b.jsonl", rows(20, start=50)) | {"path": str(folder)}
    assert sum(make_environment(section).settings().values()) == 40


def test_folder_with_evaluation_file_is_rejected_with_remedy(tmp_path):
    write_rows(tmp_path / "train.jsonl", rows(20))
    section = write_rows(tmp_path / "test.jsonl", rows(20, start=50)) | {"path": str(tmp_path)}
    with pytest.raises(RequestError, match=r"a file for evaluation: test\.jsonl") as raised:
        make_environment(section)
    assert "heldout: {path: FOLDER/test.jsonl}" in raised.value.remedy
    files = {"path": str(tmp_path / "train.jsonl"), "heldout": {"path": str(tmp_path / "test.jsonl")}}
    assert make_environment(section | files).settings() == {"train": 20, "heldout": 20}


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_byte_order_mark_is_ignored(tmp_path, start):
    path = tmp_path / "sums.jsonl"
    section = write_rows(path, rows(40))
    path.write_bytes(start + path.read_bytes())
    assert sum(make_environment(section).settings().values()) == 40


@pytest.mark.parametrize(
    ("name", "data", "error", "remedy"),
    [
        ("sums.jsonl.gz", gzip.compress(b'{"prompt": "1?"}\n', mtime=0), "is compressed", "gunzip"),
        ("sums.jsonl", '{"prompt": "1?"}'.encode("utf-16"), "is UTF-16", "iconv"),
        ("sums.csv", b"prompt,answer\n1?,2\n", "a CSV file, not JSON Lines", "read_csv('sums.csv')"),
        ("sums.json", b'\n[{"prompt": "1?", "answer": 2}]', "a JSON list, not JSON Lines", "read_json("),
        ("sums.parquet", b"PAR1", "a Parquet file, not JSON Lines", "read_parquet("),
    ],
)
@pytest.mark.parametrize("broken", ["stop", "drop"])
def test_file_of_other_format_is_rejected(tmp_path, name, data, error, remedy, broken):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RequestError, match=error) as raised:
        make_environment({"id": "jsonl", "path": str(tmp_path / name), "broken_rows": broken})
    assert remedy in raised.value.remedy and raised.value.where == str(tmp_path / name)


def test_index_takes_less_than_100_bytes_per_row(tmp_path):
    many = [row | {"notes": "long " * 400} for row in rows(4000)]
    section = write_rows(tmp_path / "many.jsonl", many)
    make_environment(section | {"match": "exact"})  # load modules and caches before the measurement
    tracemalloc.start()
    environment = make_environment(section)
    tasks = environment.tasks("train", 0)
    next(tasks)
    size = tracemalloc.get_traced_memory()[0] / len(many)
    tracemalloc.stop()
    assert size < 100  # bytes; the rows themselves have 2 kB each
    assert len({task.task_id for task in tasks}) + 1 == environment.settings()["train"]


def test_tasks_fail_when_file_changes(tmp_path):
    path = tmp_path / "sums.jsonl"
    tasks = make_environment(write_rows(path, rows(30))).tasks("train", 0)
    next(tasks)
    write_rows(path, rows(30, start=50))
    with pytest.raises(RequestError, match="has changed since") as raised:
        next(tasks)
    assert raised.value.where.startswith(f"{path}:")


def test_first_row_of_equal_prompts_is_kept(tmp_path, caplog):
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_rows(folder / "a.jsonl", rows(20))
    section = write_rows(folder / "b.jsonl", [*rows(3, start=18), *rows(3, start=18)])
    section |= {"path": str(folder), "broken_rows": "drop"}
    with caplog.at_level(logging.WARNING):
        kept = make_environment(section)
    assert sum(kept.settings().values()) == 21
    (warning,) = [record.getMessage() for record in caplog.records]
    index = load_index(str(folder), "number", "drop", HeldOut())
    pairs = [
        (index.location(again)[-9:], index.location(first)[-10:])
        for again, first in index.find_repeated_prompts()
    ]
    assert pairs[0] == ("b.jsonl:1", "a.jsonl:19") and pairs[2] == ("b.jsonl:4", "a.jsonl:19")
    assert warning.startswith("left out 5 invalid rows of 26")
    assert "b.jsonl:1: has the same" in warning and "a.jsonl:19" in warning


BROKEN = {
    "{": "not JSON",
    "[1]": "not a JSON object",
    '{"answer": 1, "question": "1?"}': 'prompt and messages; this row has "answer", "question"',
    '{"prompt": "", "answer": 1}': "the last message is empty",
    '{"prompt": "1?"}': "has no answer",
    '{"prompt": "1?", "answer": true}': "of type bool, neither",
    '{"prompt": "1?", "answer": "one"}': "contains no number",
    '{"prompt": "1?", "answer": NaN}': "is not a JSON number",
    '{"prompt": "1?", "answer": 1, "task_id": 3}': "is reserved",
    '{"messages": [{"role": "robot", "content": "1?"}], "answer": 1}': "must have a role",
    '{"messages": [{"role": "assistant", "content": "1"}], "answer": 1}': "the assistant's",
    '{"prompt": "What is 0 + 0?", "answer": 5}': "has the same prompt",
    '{"prompt": "\\ud800", "answer": 5}': "half of a surrogate pair",
    "[" * 100_000: "nested too deeply",
    '{"prompt": "1 + 1", "answer": 2, "answer": 3}': "'answer' occurs twice",
    '{"prompt": "1 + 1", "answer": 2, "more": {"a": 1, "a": 2}}': "'a' occurs twice",
    '{"prompt": "1 + 1", "answer": 1e400}': "beyond the range",
}


@pytest.mark.parametrize("line", BROKEN)
def test_invalid_row_is_rejected_or_dropped_with_warning(tmp_path, caplog, line):
    path = tmp_path / "sums.jsonl"
    section = write_rows(path, rows(40))
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(RequestError, match=BROKEN[line]) as raised:
        make_environment(section)
    assert raised.value.where == f"{path}:42"
    with caplog.at_level(logging.WARNING):
        kept = make_environment(section | {"broken_rows": "drop"})
    assert sum(kept.settings().values()) == 40
    (warning,) = [record.getMessage() for record in caplog.records]
    assert (
        warning.startswith("left out 1 invalid rows of 41")
        and f"{path}:42" in warning
        and BROKEN[line] in warning
    )


def test_unreadable_and_empty_files_are_rejected(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(RequestError, match=r"no such file|has no \*.jsonl"):
            make_environment({"id": "jsonl", "path": str(path)})
    with pytest.raises(RequestError, match=r"no (training|held-out) rows"):
        make_environment(write_rows(tmp_path / "one.jsonl", rows(2)))
    bytes_ = tmp_path / "bytes.jsonl"
    bytes_.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(RequestError, match="not UTF-8"):
        make_environment({"id": "jsonl", "path": str(bytes_)})
    bytes_.write_bytes(b'{"question": "1?", "answer": "1"}\n' * 2)
    with pytest.raises(RequestError, match=r'no valid rows; the first: .*bytes.jsonl:1: .* "question"'):
        make_environment({"id": "jsonl", "path": str(bytes_), "broken_rows": "drop"})
    bytes_.unlink()
    bytes_.symlink_to(bytes_)
    with pytest.raises(RequestError, match="symbolic links") as raised:
        make_environment({"id": "jsonl", "path": str(tmp_path)})
    assert raised.value.where == str(bytes_)


@pytest.mark.parametrize(
    ("match", "answer", "right", "wrong"),
    [
        ("exact", "Paris", ["Paris", " Paris\n"], ["paris", "Paris.", "in Paris", ""]),
        ("exact", "caf\u00e9", ["cafe\u0301"], ["cafe", "caf\u0435\u0301"]),
        ("number", "1000", ["1,000", "so it is 1000.0", "2 or 1000"], ["1000 2", "001000", "1e3", "x1000"]),
        ("number", "-0.5", ["-0.50", "= -0.5."], ["0.5", "-5"]),
        ("number", "2", ["4/2 = 2", "2 km/h", "2^\\circ"], ["1/2", r"\frac{1}{2}", "3^2", r"\sqrt{2}"]),
        ("number", "-2", ["\u22122"], ["2"]),
        ("math", r"\frac12", ["1/2", "0.50", r"$\dfrac{1}{2}$"], ["2", "1 or 1/2", "2/4", "so 1/2"]),
        ("contains", "New York", ["It is new york, I think"], ["York New", "New Yorker"]),
        ("regex", r"(?i)paris|lutetia", ["paris", "Lutetia"], ["not paris", "paris lutetia"]),
    ],
)  # fmt: skip
def test_match_rules_compare_answers(match, answer, right, wrong):
    assert [matches(match, text, answer) for text in right] == [True] * len(right)
    assert [matches(match, text, answer) for text in wrong] == [False] * len(wrong)
    assert find_last_number("0" * 200) is None


def test_truncated_answer_earns_nothing(section):
    environment = make_environment(section)
    task = next(environment.tasks("train", 0))
    gold = environment.gold(task)
    assert environment.score(task, gold).reward == 1.0
    assert environment.score(task, Transcript(gold.text, finished=False)).reward == 0.0


def test_reward_functions_replace_match_rule(tmp_path):
    asked = [{"prompt": f"Say {n} words", "words": n} for n in range(1, 40)]
    section = write_rows(tmp_path / "words.jsonl", asked) | {"match": None}
    task = next(make_environment(section).tasks("train", 0))
    assert isinstance(make_environment(section).score(task, Transcript("a")), Failure)
    source = (
        "def fits(completions, words, **_):\n    return [float(len(completions[0].split()) == words[0])]\n"
    )
    function = {"function": "fits.py:fits", "weight": 2.0, "format": "text", "source": source}
    with Scorer(section | {"rewards": {"fits": function}}) as scorer:
        (outcome,) = scorer.score([(task, Transcript("a " * task.data["words"]))])
    assert (outcome.reward, dict(outcome.terms), dict(outcome.metrics)) == (2.0, {"fits": 1.0}, {})
    with pytest.raises(RequestError, match="no verifier of its own"):
        make_environment(section | {"rewards": {"verifier": 1.0}})


def test_audit_grades_exact_match_above_contains_match(tmp_path):
    capitals = ["no", "yes"] * 20
    asked = [{"prompt": f"Is {n} odd?", "answer": word} for n, word in enumerate(capitals)]
    section = write_rows(tmp_path / "odd.jsonl", asked)
    strict = audit_reward(section | {"match": "exact"}, tasks=6, search_budget=0)
    loose = audit_reward(section | {"match": "contains"}, tasks=6, search_budget=0)
    assert strict.grade in "AB" and loose.grade == "F"


RECIPE = """
name: sums
model: {preset: tiny}
environment: {id: jsonl, path: tasks/sums.jsonl, match: number, heldout: {path: kept.jsonl}}
stages:
  - {name: traces, task: collect, teacher: gold, traces: 5}
"""


def test_bundle_contains_rows_and_digest_does_not_depend_on_folder(tmp_path):
    digests = []
    for name in ("here", "there"):
        folder = tmp_path / name
        (folder / "tasks").mkdir(parents=True)
        write_rows(folder / "tasks" / "sums.jsonl", rows(20))
        write_rows(folder / "kept.jsonl", rows(3, start=50))
        (folder / "sums.yaml").write_text(RECIPE)
        recipe = load_recipe(folder / "sums.yaml")
        job, inputs = stage_files(build_job(recipe, recipe.stages[0]))
        digests.append(freeze(job, inputs, tmp_path / f"bundle-{name}"))
        shutil.rmtree(folder)
    assert digests[0] == digests[1]
    environment = make_environment(Workspace(tmp_path / "bundle-here").job.environment)
    assert environment.settings() == {"train": 20, "heldout": 3}


def test_recipe_without_match_needs_rewards(tmp_path):
    (tmp_path / "tasks").mkdir()
    write_rows(tmp_path / "tasks" / "sums.jsonl", rows(20))
    write_rows(tmp_path / "kept.jsonl", rows(3, start=50))
    recipe = tmp_path / "sums.yaml"
    recipe.write_text(RECIPE.replace("match: number", "match: null"))
    with pytest.raises(RequestError, match="no rewards are given, so nothing is scored") as raised:
        load_recipe(recipe)
    assert raised.value.where.endswith("sums.yaml:4")
    (tmp_path / "fits.py").write_text("def fits(completions, **_):\n    return [1.0]\n")
    recipe.write_text(recipe.read_text() + "rewards: {fits: {function: fits.py:fits, weight: 1.0}}\n")
    load_recipe(recipe)
    recipe.write_text(RECIPE.replace("traces: 5}", "traces: 5, environment: {match: null}}"))
    with pytest.raises(RequestError, match="no rewards are given, so nothing is scored"):
        load_recipe(recipe)


def test_recipe_names_invalid_row(tmp_path):
    (tmp_path / "tasks").mkdir()
    write_rows(tmp_path / "tasks" / "sums.jsonl", [*rows(3), {"prompt": 1}])
    write_rows(tmp_path / "kept.jsonl", rows(3, start=50))
    (tmp_path / "sums.yaml").write_text(RECIPE)
    with pytest.raises(RequestError, match=r"sums.jsonl:4: the prompt is neither") as raised:
        load_recipe(tmp_path / "sums.yaml")
    assert raised.value.where.endswith("sums.yaml:4")
