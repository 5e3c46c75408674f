"""Two experiments of one home side by side: the comparison page, and the attempts of both at one task."""

import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from browser_cases import needs_browser
from live_home import SCRIPT, environment, pages
from test_live_page import open_page, until

pytestmark = needs_browser

RECIPE = """\
name: judged
model: {preset: tiny}
environment: {id: factory, factory: "task_environments:Digits"}
resources: {device: cpu, threads: 1}
stages:
  - {name: judge, task: evaluate, checkpoint: model, tasks: 6, samples: 4, max_tokens: 4}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "judged.yaml").write_text(RECIPE)
    for changes in (["judge.max_tokens=4"], ["judge.max_tokens=6"], ["name=other", "seed=1"]):
        command = [SCRIPT, "run", "judged.yaml", *(text for change in changes for text in ("--set", change))]
        subprocess.run(command, cwd=folder, env=environment(folder / "home"), check=True, capture_output=True)
    with pages(folder / "home") as address:
        yield address


def test_comparison_opens_one_task_of_two_runs_side_by_side(browser: Any, url: str) -> None:
    found = httpx.get(f"{url}/experiments.json").json()["experiments"]
    first, second = sorted(one["experiment_id"] for one in found if one["name"] == "judged")
    page, errors = open_page(browser, f"{url}/compare/{first},{second}?left={second}", "#tasks table")
    assert page.get_by_label("Right").input_value() == first
    row = page.locator("#tasks tbody tr").nth(2)
    task = row.locator("th").inner_text()
    row.locator("a").click()
    other = page.locator(".detail > div:last-child .chart-tools a")
    other.wait_for()
    tasks = page.locator(".detail dd", has_text=task)
    assert tasks.count() == 2  # both columns
    lengths = page.locator(".detail .fields div", has_text="tokens").all_inner_texts()
    assert lengths[1] == "length\n4 tokens" != lengths[0]  # the first is cut off earlier
    assert other.inner_text() == first
    assert page.url.startswith(f"{url}/experiments/{second}?with={first}#episodes/judge/samples")

    page.get_by_role("button", name="Next", exact=True).click()
    until(page, "document.querySelectorAll('.detail h3')[0].textContent.endsWith('sample 1')")
    until(page, "[...document.querySelectorAll('.detail h3')].at(-1).textContent.endsWith('sample 1')")
    page.get_by_label("Other experiment").fill("nothing")
    page.locator(".detail [role=status]", has_text="The episodes of nothing could not be read.").wait_for()
    assert [error for error in errors if "404" not in error] == []
    page.get_by_label("Other experiment").fill("")
    until(page, "!document.querySelector('.browser.paired')")
    page.close()


def test_other_experiment_without_the_task_is_named(browser: Any, url: str) -> None:
    page, errors = open_page(browser, f"{url}/experiments/judged?with=other#episodes", ".detail h3")
    page.locator(".detail [role=status]", has_text="other has no episode of this task.").wait_for()
    assert errors == []
    page.close()
