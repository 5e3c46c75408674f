"""Run every example of the README and docs/ with small settings, and load every recipe.

All tests share one experiment. `make thorough` runs the pages with long training. Otherwise their
commands are parsed, their code is compiled and their recipes are loaded.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, RUN, SHOWN, Block, blocks
from doc_runner import Runner

pytestmark = pytest.mark.slow

MOST_NOT_RUN = 20  # limit of excluded blocks; each gives a reason

ALL = [block for page in PAGES for block in blocks(page)]
WITH_EXAMPLES = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]
# Each takes 4 to 30 CPU seconds. Tests of their own compare what the commands of CONTRIBUTING.md write.
LONG = {ROOT / "CONTRIBUTING.md"} | {
    ROOT / "docs" / f"{name}.md"
    for name in (
        "explanation/sandbox", "how-to/asynchronous", "how-to/coming-from-trl", "how-to/connect-four",
        "how-to/data", "how-to/environments", "how-to/evaluate-while-training", "how-to/games",
        "how-to/hand-over", "how-to/lora", "how-to/mixtures", "how-to/model-card", "how-to/oolong",
        "how-to/openvino", "how-to/other-packages", "how-to/own-data", "how-to/own-environment",
        "how-to/own-metric", "how-to/own-model", "how-to/own-teacher", "how-to/planning",
        "how-to/read-the-report", "how-to/real-model", "how-to/regression-suites",
        "how-to/resume-and-reproduce", "how-to/reward-audit", "how-to/reward-functions",
        "how-to/routing-replay", "how-to/serve", "how-to/several-turns", "how-to/simulate", "how-to/sweep",
        "how-to/task-plugin", "how-to/track", "how-to/wiki", "recipes/arithmetic", "recipes/calculator",
        "recipes/families", "recipes/flywheel", "recipes/instructions", "recipes/lora", "recipes/preference",
        "recipes/system-prompt", "reference/episode", "tutorial/loop-by-hand", "tutorial/own-recipe",
        "tutorial/quickstart",
    )
}  # fmt: skip
# Recipes of these pages read files that the page's commands write.
ON_WRITTEN_FILES = {
    ROOT / "docs" / "how-to" / f"{name}.md"
    for name in ("coming-from-trl", "own-data", "own-model", "regression-suites", "routing-replay")
}


def relative_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", sorted(LONG - ON_WRITTEN_FILES), ids=relative_name)
def test_examples_of_long_pages_are_valid(page: Path, runner: Runner) -> None:
    runner.runs = False
    for block in blocks(page):
        if block.language in RUN and not block.not_run:
            runner.do(block)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.thorough] if page in LONG else []) for page in WITH_EXAMPLES],
    ids=relative_name,
)
@pytest.mark.usefixtures("experiment")
def test_examples_run(page: Path, runner: Runner) -> None:
    for block in blocks(page):
        if block.language in RUN and not block.not_run:
            runner.do(block)


def attempt(stage: str, environment: dict[str, str]) -> Path:
    command = ["perilune", "show", f"quickstart/{stage}", "--json"]
    out = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    return Path(json.loads(out)["directory"])


@pytest.mark.usefixtures("experiment")
@pytest.mark.parametrize("stage", ["traces", "sft", "rl", "after_rl"])
def test_every_metric_of_a_run_is_documented(stage: str, environment: dict[str, str]) -> None:
    documented = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
    artifacts = attempt(stage, environment) / "artifacts"
    for name in ("metrics.jsonl", "timings.jsonl", "hardware.jsonl"):
        for line in (artifacts / name).read_text().splitlines() if (artifacts / name).exists() else ():
            named = {
                re.sub("^(strategy|accuracy|source|term)/.*", r"\1/NAME", key) for key in json.loads(line)
            }
            assert named <= documented, f"{name} of {stage}"
    summary = {
        re.sub(r"^pass@\d+$", "pass@1", key) for key in json.loads((artifacts / "summary.json").read_text())
    }
    assert summary <= documented, f"summary.json of {stage}"


def test_every_block_has_a_known_language() -> None:
    odd = [f"{block.place}: {block.language!r}" for block in ALL if block.language not in RUN | SHOWN]
    assert not odd


def test_few_examples_are_excluded() -> None:
    excepted = [block for block in ALL if block.not_run]
    listing = "\n".join(f"{block.place}: {block.not_run}" for block in excepted)
    print(f"{len(excepted)} of {len(ALL)} blocks are not run:\n{listing}")
    assert len(excepted) <= MOST_NOT_RUN, listing


@pytest.mark.parametrize(
    ("language", "text", "error", "message"),
    [
        ("python", "1 / 0\n", ZeroDivisionError, "division"),
        ("console", "$ perilune quickstrat\n", AssertionError, "unknown command 'quickstrat'"),
        ("bash", "false | true\n", AssertionError, "exit code 1"),
        ("yaml", "sede: 1\n", AssertionError, "sede"),
        ("toml", "[project\n", ValueError, "line 1"),
        ("json", "{]\n", ValueError, "line 1"),
    ],
)
def test_runner_fails_for_broken_examples(
    runner: Runner, language: str, text: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        runner.do(Block(ROOT / "README.md", 7, language, "", text, ""))


def test_runner_finds_misspelt_option_without_running_it(runner: Runner) -> None:
    runner.runs = False
    with pytest.raises(Exception, match="No such option: --sede"):
        runner.do(Block(ROOT / "README.md", 7, "bash", "", "perilune run sums.yaml --sede 1 | tail\n", ""))


def test_runner_shrinks_recipes_and_times_out(runner: Runner) -> None:
    small = runner.small("perilune run quickstart --set rl.steps=500 | tail -n 1")
    assert small.index("rl.steps=500") < small.index("rl.steps=2") < small.index("| tail -n 1")
    assert runner.small("perilune runs") == "perilune runs"
    assert "--set rl.lr=1,2 --seeds 1 " in runner.small(
        "perilune sweep quickstart --set rl.lr=1,2,3 --seeds 5"
    )
    runner.seconds = 0.2
    with pytest.raises(subprocess.TimeoutExpired):
        runner.do(Block(ROOT / "README.md", 7, "bash", "", "sleep 5\n", ""))
