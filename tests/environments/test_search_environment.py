"""The environment `search`: functions in code and as single calls, on generated and user corpora."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from perilune.data.generators import make_teacher
from perilune.environments import Transcript, make_environment
from perilune.environments.core.keyed_random import KeyedRandom
from perilune.environments.core.protocol import Score, Task
from perilune.environments.core.replay import replay_conversation
from perilune.environments.search import functions
from perilune.environments.search.corpus import Corpus
from perilune.environments.search.index import Index, get_index
from perilune.environments.search.stack import InvalidCallError, SearchStack
from perilune.errors import RequestError
from perilune.verifiers.audit import audit_reward
from perilune.verifiers.conformance import check_environment

FACTS = {"id": "facts", "style": "compact", "companies": 40, "corpora": 2}
COMPACT: dict[str, Any] = {
    "id": "search",
    "prompt": "compact",
    "sandbox": {"memory_mb": 64, "processes": 1},
    "tasks": FACTS,
}
PLANETS = [
    {"text": "Mars is a planet. Its moons are Phobos and Deimos."},
    {"id": "v", "title": "Venus", "text": "A planet without moons."},
    {"text": "mars is a planet; its moons are Phobos and Deimos"},
    {"title": "Sun", "text": "A star."},
]


def documents(*texts: str) -> list[dict[str, str]]:
    return [{"id": f"d{number}", "title": "", "text": text} for number, text in enumerate(texts, 1)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A section with a user's corpus and questions."""
    folder: Path = tmp_path_factory.mktemp("corpus")
    (folder / "planets.jsonl").write_text("".join(json.dumps(planet) + "\n" for planet in PLANETS))
    rows = [{"prompt": f"What is a moon of Mars? {n}", "answer": "Phobos"} for n in range(20)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"id": "jsonl", "path": str(folder / "questions.jsonl")}
    return {"id": "search", "corpus": str(folder / "planets.jsonl"), "tasks": tasks}


def play(section: dict[str, Any], actions: Sequence[str]) -> tuple[Score, list[str]]:
    """The score of an episode, and the tool messages that the policy saw."""
    environment = make_environment(section)
    task = next(environment.tasks("train", 0))
    transcript = Transcript(actions[-1], earlier=tuple(actions[:-1]))
    score = environment.score(task, transcript)
    seen = replay_conversation(environment, task, transcript)[len(task.prompt) :]
    environment.close()
    assert isinstance(score, Score)
    return score, [message["content"] for message in seen if message["role"] == "tool"]


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_search_ranks_rare_words_first_and_breaks_ties_by_document_order() -> None:
    index = Index(documents("a b", "a c", "a b", "d"))
    assert [document["id"] for document in index.search("a b", 9)] == ["d1", "d3", "d2"]
    assert index.search("B", 1) == [index.search("b", 1)[0]] and index.search("nothing", 5) == []
    assert Index(documents("...", "?")).search("a", 3) == []


def test_equal_corpora_share_index() -> None:
    first, other = (Corpus(tuple(documents("a", "b"))) for _ in range(2))
    assert get_index(first) is get_index(other) is not get_index(Corpus(tuple(documents("a"))))


def test_filter_dedup_and_extract_functions() -> None:
    hits = documents("Kova has its seat in Lumi.", "kova has its SEAT in lumi", "Bela is led by Rita.")
    assert functions.filter(hits, "seat LUMI") == hits[:2] and functions.filter(hits, "sea") == []
    assert functions.dedup(hits) == [hits[0], hits[2]]
    assert functions.dedup(documents("a bc", "ab c")) == documents("a bc", "ab c")
    assert functions.extract(hits, "seat in {}.") == ["Lumi"]
    assert functions.extract(hits, "SEAT in {}") == ["Lumi", "lumi"]
    assert functions.extract(hits, "{} is led") == ["Bela"] and functions.extract(hits, "x {}") == []
    for wrong in ("no place", "{} {}"):
        with pytest.raises(ValueError, match="needs one"):
            functions.extract(hits, wrong)


def test_rerank_keeps_documents_without_match() -> None:
    stack = SearchStack(Index(documents("a")), 5, 5)
    given = documents("x", "y z", "z")
    assert [document["id"] for document in stack.call("rerank", [given, "z"], {})] == ["d3", "d2", "d1"]
    assert stack.call("rerank", [given], {"query": "y", "k": 1}) == [given[1]]


def test_search_limits_number_and_size_of_results() -> None:
    stack = SearchStack(Index(documents("a", "a", "a")), 2, 5)
    assert len(stack.call("search", ["a"], {})) == 2 and len(stack.call("search", ["a", 1], {})) == 1
    assert len(stack.call("fan_out", [["a", "b", "a"]], {})) == 4 and stack.searches == 5
    large = SearchStack(Index(documents("a " * 300_000)), 2, 5)
    assert large.call("search", ["a"], {})
    with pytest.raises(InvalidCallError, match="ask for fewer"):
        large.call("search", ["a"], {})


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("search", [3], "search: query: Input should be a valid string"),
        ("search", ["a", 0], "greater than or equal to 1"),
        ("search", ["a", 1, 2], "search: too many: Unexpected positional argument"),
        ("search", [], "search: query: Missing required argument"),
        ("fan_out", ["ab"], "valid list"),
        ("fan_out", [["a"] * 6], "6 searches are needed, and 5 are left"),
        ("filter", [[{"text": 1}], "a"], "valid string"),
        ("dedup", [[{}]], "dedup: 'text'"),
    ],
)
def test_invalid_calls_are_rejected_with_reason(name: str, arguments: list[Any], error: str) -> None:
    with pytest.raises(InvalidCallError, match=error):
        SearchStack(Index(documents("a")), 5, 5).call(name, arguments, {})


@pytest.mark.parametrize("mode", ["code", "calls"])
def test_search_teacher_is_correct_for_every_kind_of_question(mode: str) -> None:
    environment = make_environment({**COMPACT, "mode": mode})
    teacher = make_teacher("search", {mode: 1.0})
    observed: dict[str, float] = {}
    for task in islice(environment.tasks("train", 0), 12):
        kind = task.data["task"]["question"]["kind"]
        if kind in observed:
            continue
        *earlier, last = teacher.script(task, mode, KeyedRandom(0, ""))  # type: ignore[attr-defined]
        score = environment.score(task, Transcript(last, earlier=tuple(earlier)))
        assert isinstance(score, Score) and score.reward == 1.0 and score.metrics[f"strategy/{mode}"]
        observed[kind] = score.metrics["observed"]
    environment.close()
    assert set(observed) == {"one", "two", "count", "join"}
    fewest, most = (3, 6) if mode == "code" else (40, 900)
    assert all(fewest <= number <= most for number in observed.values())


def test_answers_match_scan_of_all_documents() -> None:
    environment: Any = make_environment(FACTS)
    for task in islice(environment.tasks("heldout", 3), 60):
        texts = {document["text"] for document in environment.corpus(task).documents}
        name, goods = task.data["question"]["name"], task.data["question"]["goods"]
        in_city = {text.split()[0] for text in texts if text.endswith(f" c {name}")}
        match task.data["question"]["kind"]:
            case "one":
                relation = task.data["question"]["relation"]
                assert f"{name} {relation} {task.data['answer']}" in texts
            case "two":
                (head,) = (text.split()[2] for text in texts if text.startswith(f"{name} h "))
                assert f"{head} l {task.data['answer']}" in texts
            case "count":
                assert task.data["answer"] == str(len(in_city))
            case "join":
                assert task.data["answer"] == str(sum(f"{company} s {goods}" in texts for company in in_city))


def test_splits_share_no_corpus_and_tasks_are_finite() -> None:
    environment: Any = make_environment({**FACTS, "companies": 4, "corpora": 1})
    train, heldout = (list(environment.tasks(split, 0)) for split in ("train", "heldout"))
    assert 0 < len(train) < 50 and len({task.task_id for task in train}) == len(train)
    assert not {task.data["world"] for task in train} & {task.data["world"] for task in heldout}


def test_context_contains_results_of_calls_but_not_of_code(own: dict[str, Any]) -> None:
    searches = "found = search('moons of Mars')"
    score, seen = play(own, [fenced(searches), fenced("print(len(dedup(found)))"), "<answer>Phobos</answer>"])
    assert seen == ["(no output)", "2\n"] and score.reward == 1.0
    assert score.metrics["observed"] == len("".join(seen)) and score.metrics["searches"] == 1
    actions = [
        call("search", query="moons of Mars"),
        call("dedup"),
        call("extract", template="moons are {} and"),
    ]
    score, seen = play({**own, "mode": "calls"}, [*actions, "<answer>Phobos</answer>"])
    assert (
        seen[1] == f"1 {PLANETS[0]['text']}\n2 Venus: A planet without moons.\n" and seen[2] == "1 Phobos\n"
    )
    assert score.reward == 1.0 and score.metrics["calls"] == 3


def test_calls_use_documents_of_previous_call(own: dict[str, Any]) -> None:
    actions = [
        call("dedup"),
        call("fan_out", queries=["venus", "star"]),
        call("filter", words="a", documents=[2]),
        call("filter", words="planet", documents=[2]),
        call("rerank", query="star", documents=[1]),
        call("extract", template="{} star"),
        call("dedup"),
        call("python", code="1"),
        "<tool_call>no</tool_call>",
        "<answer>Phobos</answer>",
    ]
    _, seen = play({**own, "mode": "calls", "turns": 12}, actions)
    assert seen[:3] == ["(nothing)", "1 Venus: A planet without moons.\n2 Sun: A star.\n", "1 Sun: A star.\n"]
    assert seen[3] == "error: documents is a list of numbers up to 1" and seen[4] == "1 Sun: A star.\n"
    assert seen[5:7] == ["1 A\n", "1 Sun: A star.\n"]
    assert seen[7:] == ["error: there is no function python", "error: a malformed call"]


def test_too_large_results_end_block_but_not_episode(
    own: dict[str, Any],
) -> None:
    code = "for n in range(6): search(f'{n}' * 10**6)"
    score, seen = play(own, [fenced("n = 5"), fenced(code), fenced("print(n)"), "<answer>Phobos</answer>"])
    assert seen[1].startswith("[ended: results") and seen[2] == "5\n" and score.reward == 1.0


def test_function_errors_are_exceptions_in_code(own: dict[str, Any]) -> None:
    code = "try: search('a', k='b')\nexcept RuntimeError as error: print(error)\nextract([], 'x')"
    _, (seen,) = play(own, [fenced(code), "<answer>x</answer>"])
    assert seen.startswith("search: k: Input should be a valid integer") and "needs one {}" in seen


@pytest.mark.parametrize(
    "text", ["search", "search(*x)", "(" * 3000, "__import__('os')", "search(open('a'))"]
)
def test_malformed_compact_call_shows_error(text: str) -> None:
    _, (seen,) = play({**COMPACT, "mode": "calls"}, [text, ";x"])
    assert seen.startswith("error: ")


def test_episode_without_answer_earns_0_and_keeps_metrics() -> None:
    score, seen = play({**COMPACT, "mode": "calls", "turns": 2}, ["search('a')", "search('c')"])
    assert score.reward == 0.0 and score.metrics["searches"] == 2 and len(seen) == 1


@pytest.mark.parametrize(
    "section",
    [FACTS, {**FACTS, "style": "natural"}, COMPACT, {**COMPACT, "prompt": "natural", "mode": "calls"}],
)
def test_search_environments_pass_conformance(section: dict[str, Any]) -> None:
    report = check_environment(section, tasks=1)
    assert not report.findings, report.findings


@pytest.mark.parametrize("style", ["natural", "compact"])
def test_audit_grades_facts_a(style: str) -> None:
    audit = audit_reward({**FACTS, "style": style}, tasks=2, search_budget=8)
    assert audit.grade == "A", audit.findings


@pytest.mark.parametrize(
    ("line", "error"),
    [("[]", "not a JSON object"), ('{"text": 3}', "'text' is not a text"), ("", "has no documents")],
)
def test_invalid_corpus_is_rejected(tmp_path: Path, line: str, error: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(line)
    with pytest.raises(RequestError, match=error):
        make_environment({"id": "search", "corpus": str(path), "tasks": {"id": "instructions"}})


def test_search_needs_documents_from_either_tasks_or_file() -> None:
    with pytest.raises(RequestError, match="have no documents"):
        make_environment({"id": "search", "tasks": {"id": "instructions"}})
    with pytest.raises(RequestError, match="have documents of their own"):
        make_environment({"id": "search", "corpus": "x.jsonl", "tasks": {"id": "facts"}})
    with pytest.raises(RequestError, match="compact tasks of facts"):
        task = Task("", (), {"task": {"style": "natural"}})
        make_teacher("search", {"code": 1.0}).script(task, "code", KeyedRandom(0, ""))  # type: ignore[attr-defined]
