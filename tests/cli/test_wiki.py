"""The wiki of a home with one real run and signed copies: build, lint, search, slides and questions."""

import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cli_cases import LIGHT, SCRIPT, environment

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from perilune.control.evidence.verification import find_run_problems
from perilune.control.queries.lookup import find_run
from perilune.control.record.home import Home
from perilune.control.runs.experiments import Control
from perilune.errors import RequestError
from perilune.wiki.build import Wiki, compile_wiki
from perilune.wiki.facts import Figure, RunFacts
from perilune.wiki.lint import RULES, lint_wiki
from perilune.wiki.markdown import HAND_BEGIN, HAND_END, find_citations, make_slug, quote
from perilune.wiki.plot import plot_runs
from perilune.wiki.query import Facts
from perilune.wiki.search import link_sources, rank_passages, split_passages
from perilune.wiki.slides import render_slides
from wiki_faults import BEFORE_A_BUILD, Planter, add_arms, question, spare_runs
from wiki_home import another_run, figure, tampered
from wiki_sentences import SOUND

RUN = "small/base"
ARM = "recipe words stage base with arm"
FAULTS = 10  # of each kind
# The faults that no rule finds, such as a comparison in other words.
MISSED = {"few-seeds": 1, "overlap": 1, "uncited-best": 2, "uncited-comparison": 1, "bare-number": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a home: a real run, three arms and spare runs."""
    folder = tmp_path_factory.mktemp("wiki")
    (folder / "small.yaml").write_text(LIGHT)
    command(folder, "run", "small.yaml")
    control = Control(Home.open(folder / "home"))
    add_arms(control, RUN)
    spare_runs(control, RUN, FAULTS)
    assert not any(
        list(find_run_problems(control, find_run(control, name))) for name in ("words/base", "spare3/base")
    )
    control.store.close()
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the home that a test may damage."""
    shutil.copytree(made / "home", tmp_path / "home", symlinks=True)
    return tmp_path


@pytest.fixture
def control(folder: Path) -> Iterator[Control]:
    opened = Control(Home.open(folder / "home"))
    yield opened
    opened.store.close()


def command(folder: Path, *words: str, code: int = 0, **variables: str) -> str:
    done = subprocess.run(
        [SCRIPT, *words],
        cwd=folder,
        env=environment(folder / "home") | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + (done.stderr if code else "")


def build_wiki(control: Control, text: str = "") -> Wiki:
    """Build the wiki with one question page."""
    wiki = Wiki.of(control)
    run = find_run(control, "words/base").id
    wiki.write("questions/q-0.md", text or question("base", run))
    result = compile_wiki(wiki, wiki.facts(control))
    assert not result.unanswered
    return wiki


def lint_codes(wiki: Wiki, control: Control) -> set[tuple[str, str]]:
    return {(fault.page, fault.code) for fault in lint_wiki(wiki.pages(), wiki.facts(control, verify=True))}


@pytest.mark.thorough
def test_build_is_deterministic_and_has_no_findings(control: Control, tmp_path: Path) -> None:
    wiki = build_wiki(control)
    again = Wiki(tmp_path / "again")
    again.write("questions/q-0.md", wiki.pages()["questions/q-0"])
    compile_wiki(again, again.facts(control))
    files = {p.relative_to(wiki.root): p.read_bytes() for p in wiki.root.rglob("*.*") if p.is_file()}
    assert files.keys() >= {
        Path("index.md"),
        Path("log.md"),
        Path("recipes/words.md"),
        Path("recipes/words.svg"),
    }
    for name, data in files.items():
        assert ".perilune" in name.parts or (again.root / name).read_bytes() == data
    assert compile_wiki(wiki, wiki.facts(control)).written == 0
    assert lint_codes(wiki, control) == set()
    page = wiki.pages()["questions/q-0"]
    assert wiki.pages()["index"].count("](questions/q-0.md)") == 1
    assert next(find_citations(page)).shown == "60.0% (35.2 to 84.8), 3 seeds"
    run = find_run(control, "words/base").id
    assert "[questions/q-0](../questions/q-0.md)" in wiki.pages()[f"runs/{run}"]  # the run page links back


@pytest.mark.parametrize("kind", RULES)
def test_lint_finds_faults_of_each_kind_and_no_others(kind: str, control: Control) -> None:
    wiki = build_wiki(control)
    run = find_run(control, "words/base").id
    for number in range(FAULTS):
        wiki.write(f"questions/q-{number}.md", question("base", run))
    compile_wiki(wiki, wiki.facts(control))
    facts = wiki.facts(control).runs
    spare = [run.id for run in facts if run.recipe.startswith("spare")]
    others = [f"runs/{run.id}" for run in facts if run.recipe == "words"]
    planter = Planter(control, wiki, "base", spare, [*others, *others])
    places = {planter.plant(kind, number, f"questions/q-{number}") for number in range(FAULTS)}
    if kind in BEFORE_A_BUILD:
        compile_wiki(wiki, wiki.facts(control))
    found = lint_codes(wiki, control)
    assert len(places & {page for page, _ in found}) == len(places) - MISSED.get(kind, 0)
    # A changed number is stale, and without its front matter a page is hand-written.
    allowed = {"stale-number", "bare-number"} if kind == "edited" else set()
    assert {kind} <= {code for _, code in found} <= {kind} | allowed


def lint_text(text: str) -> list[str]:
    """The rules that a hand-written text breaks."""
    pages = {"index": "[[questions/q]]", "questions/q": f"{text}\n"}
    return [fault.code for fault in lint_wiki(pages, Facts([])) if fault.page != "index"]


def test_lint_finds_numbers_in_any_notation() -> None:
    words = "2e-4 1.5e-3 1E5 12k 94pp 3x 2.5× 50/50 1/3 1.5/2.0 73.5% -0.3 1,000 40ms 8GB 17"
    for number in [*words.split(), "40 ms"]:
        for text in (f"It was {number} at the end.", f"* It ended at {number}."):
            assert lint_text(text) == ["bare-number"], text
        assert lint_text(f"It was `{number}` at the end.") == []


@pytest.mark.parametrize(
    "text",
    [
        "It follows section 3.2, § 4 and Table 2.1.",
        "Seeds 0, 1 and 2 ran to step 40, as Tables 1 and 2 and Fig. 3 show.",
        "Steps 10-20 are noisy.",
        "It ran on 2026-08-01, in May 2026, and in 2025.",
        "It uses Python 3.12 and 16-bit weights.",
        "SmolLM2-135M and Qwen3-0.6B run on an H100, but a 7B model is too large.",
        "The 2x2 design is from runs/12/3, and its owner is on call 24/7.",
        "See https://example.org/2024/12/a.",
        "1. It is the 3rd attempt with pass@8.",
    ],
)
def test_lint_allows_numbers_that_are_no_results(text: str) -> None:
    assert lint_text(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "A is more accurate than B.",
        "It needs fewer tokens than B.",
        "It doubles the pass rate.",
        "The mean reward has doubled.",
        "This improves on the baseline.",
        "A is far cheaper than B.",
        "A surpasses B.",
        "In May 2026, B, which has no critic, beat A.",
        "It is twice as accurate as B.",
        "A outperformed B, so it may be useful.",
        "A is superior to the others.",
    ],
)
def test_lint_finds_comparisons_without_a_query(text: str) -> None:
    assert lint_text(text) == ["uncited-comparison"]


def test_lint_accepts_sentences_without_fault() -> None:
    shown = {text: re.sub(r"\b(?:MEAN|OTHER|SINGLE|DIFFERENCE)\b", "`x`", text) for text in SOUND}
    refused = {text: codes for text, visible in shown.items() if (codes := lint_text(visible))}
    assert refused == {"The check is stricter than the parser needs it to be.": ["uncited-comparison"]}


def test_build_reports_changed_figures(control: Control) -> None:
    wiki = build_wiki(control, "At {{ best pass@1 of recipe words stage base }}.\n")
    base = find_run(control, RUN)
    newer = another_run(control, base, 5, figure(0.99), ["arm=c"], "words")
    changes = compile_wiki(wiki, wiki.facts(control)).changed
    (change,) = [change for change in changes if change.page == "questions/q-0"]
    assert change.before.startswith("90.0%") and change.after.startswith("99.0%") and newer in change.after
    tampered(control, newer, 0.5)
    result = compile_wiki(wiki, wiki.facts(control))
    assert [change.after[:5] for change in result.changed if change.page == "questions/q-0"] == ["90.0%"]
    assert "summary.json is not what was signed" in wiki.pages()[f"runs/{newer}"]
    assert (f"runs/{newer}", "failed-evidence") in lint_codes(wiki, control)


def test_build_keeps_hand_written_text(control: Control) -> None:
    wiki = build_wiki(control)
    (wiki.root / "folder.md").mkdir()
    os.mkfifo(wiki.root / "pipe.md")
    page = wiki.pages()["recipes/words"]
    note = "Read {{ mean pass@1 of recipe words stage base with arm=b }} with care."
    wiki.write("recipes/words.md", page.replace(f"\n{HAND_END}", f"{note}\n{HAND_END}"))
    compile_wiki(wiki, wiki.facts(control))
    assert (
        "Read <!--= mean pass@1 of recipe words stage base with arm=b -->61.0%"
        in wiki.pages()["recipes/words"]
    )
    edited = wiki.pages()["recipes/words"].replace("# Recipe words", "# My words")
    wiki.write("recipes/words.md", edited)
    assert compile_wiki(wiki, wiki.facts(control)).kept == ("recipes/words",)
    assert wiki.pages()["recipes/words"] == edited
    compile_wiki(wiki, wiki.facts(control), overwrite=True)
    assert "# My words" not in wiki.pages()["recipes/words"] and "Read <!--=" in wiki.pages()["recipes/words"]


def test_quoted_text_contains_no_markup() -> None:
    hostile = (
        "a`b {{ count of recipe x stage y }} <!-- hand --> [[runs/1]] [x](y.md) | <!--= q -->9<!--/-->\n# h"
    )
    quoted = quote(hostile)
    assert not list(find_citations(quoted)) and HAND_BEGIN not in quoted and "\n" not in quoted
    assert quoted.count("`") == 2 and "|" not in quoted and "[[" not in quoted and "](" not in quoted
    assert make_slug("../../etc/passwd").startswith("etc-passwd-") and make_slug("A") != make_slug("a")


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("pass@1", "is not a query"),
        ("pass@1 of run NONE", "no run is called"),
        ("pass@9 of recipe words stage base", "is not a query"),
        ("mean pass@1 of recipe words stage base", "differ in more than the seed"),
        ("mean pass@9 of recipe words stage base with arm=a", "has no figure"),
        ("count of recipe words stage nothing", "no run fits"),
        (f"mean pass@1 of {ARM}=a minus {ARM}=b", "is not a query"),
        (f"difference pass@1 of {ARM}=a seed=1 minus {ARM}=one", "no seed in common"),
    ],
)  # fmt: skip
def test_facts_refuse_unanswerable_queries(query: str, why: str, made: Path) -> None:
    control = Control(Home.open(made / "home"))
    facts: Facts = Wiki.of(control).facts(control, verify=True)
    with pytest.raises(RequestError, match=why):
        facts.ask(query)
    control.store.close()


def test_query_of_a_run_without_figures_says_its_state() -> None:
    failed = RunFacts("F", "e", "words", "base", "evaluate", "failed", "", "", 0.0, "x", (), superseded=False)
    with pytest.raises(RequestError, match=r"run F \(failed\) has no figures") as refused:
        Facts([failed]).ask("pass@1 of run F")
    assert refused.value.remedy == "cite a run with figures"


def test_build_ignores_damaged_cache(control: Control) -> None:
    wiki = build_wiki(control)
    cache = wiki.root / ".perilune" / "facts.json"
    for damage in ("{", "[]", json.dumps({find_run(control, RUN).id: [1, 2]})):
        cache.write_text(damage)
        assert compile_wiki(wiki, wiki.facts(control)).written == 0


def test_search_finds_passages_and_slides_embed_plots(control: Control) -> None:
    wiki = build_wiki(control)
    pages = wiki.pages()
    ranked = rank_passages(list(split_passages(pages)), "what did the arms reach")
    assert ranked[0][0].page == "questions/q-0"
    text = link_sources("It was 60.0% (35.2 to 84.8), 3 seeds [1], not 60.0. [9] {{ x }}", [ranked[0][0]])
    (citation,) = find_citations(text)
    assert citation.query == "mean pass@1 of recipe words stage base with arm=a"
    assert "([What did the arms reach?](../questions/q-0.md))" in text and "[9]" in text
    assert rank_passages(list(split_passages(pages)), "zzz") == []
    deck = render_slides(pages["recipes/words"], wiki.root / "recipes")
    assert deck.startswith("---\nmarp: true\npaginate: true\n---\n") and "<!--" not in deck
    plot = b64encode((wiki.root / "recipes" / "words.svg").read_bytes()).decode()
    assert f"](data:image/svg+xml;base64,{plot})" in deck and ".md)" not in deck


class _Model(BaseHTTPRequestHandler):
    """A model that answers with the text after "say: " in the question."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][1]["content"].rpartition("say: ")[2].replace("N", "7")
        answer = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_wiki_commands(folder: Path, here) -> None:
    def run(*words: str, code: int = 0) -> str:
        done = here(*words)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + (done.stderr if code else "")

    document = json.loads(run("wiki", "build", "--json"))
    assert document["pages"] == document["written"] > 10
    assert "0 findings" in run("wiki", "lint")
    assert "recipes/words.md" in run("wiki", "search", "recipe words")
    assert "there is no page 'recipes/word'" in run("wiki", "slides", "recipes/word", code=2)
    server = HTTPServer(("127.0.0.1", 0), _Model)
    Thread(target=server.serve_forever, daemon=True).start()
    ask = ("wiki", "ask", "--url", f"http://127.0.0.1:{server.server_port}", "--file")
    asked = "recipe words stage base; say: "
    assert "no passage contains: 77.7" in run(*ask, f"{asked}it was NN.N [1]", code=1)
    assert "NO_TOKEN is not set" in run(*ask, asked, "--token-env", "NO_TOKEN", code=2)
    answer = json.loads(run(*ask, f"{asked}it was 90.0% (85.0 to 95.0) [1]", "--json"))
    assert answer["unsupported_numbers"] == []
    server.shutdown()
    run("wiki", "build")
    assert "0 findings" in run("wiki", "lint")
    (filed,) = (folder / "home" / "wiki" / "questions").glob("*.md")
    assert "of run" in filed.read_text()


def test_build_lists_a_recipe_whose_only_setting_has_an_invalid_seed(control: Control) -> None:
    wiki = build_wiki(control)
    tampered(control, another_run(control, find_run(control, RUN), 9, figure(0.4), name="spare0"), 0.5)
    compile_wiki(wiki, wiki.facts(control))
    assert "Best: <!--= best pass@1 of recipe spare0 stage base -->30.0%" in wiki.pages()["recipes/spare0"]


def test_plot_has_a_row_for_each_setting_and_a_dot_for_each_seed() -> None:
    def run(key: str, seed: int, setting: str, mean: float) -> RunFacts:
        return RunFacts(
            key, "e", "words", "base", "evaluate", "succeeded", "", "", 0.0, setting, ("arm=a",), False,
            seed=seed, figures={"pass@1": Figure(mean)},
        )  # fmt: skip

    settings = plot_runs([run("1", 0, "x", 0.2), run("2", 0, "y", 0.9)])
    assert (settings.count("<circle"), settings.count("<line")) == (2, 0)
    repeated = plot_runs([run("1", 0, "x", 0.2), run("2", 0, "x", 0.9)])
    assert (repeated.count("<circle"), repeated.count("<line")) == (1, 0)
    assert plot_runs([run("1", 0, "x", 0.2), run("2", 1, "x", 0.9)]).count("<line") == 1
