"""Finished experiments of one home: two side by side, and the signatures of their results."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_cases import needs_browser
from live_home import SCRIPT, environment, pages
from test_live_page import open_page, until

from perilune.bundle.envelope import read_public_key
from perilune.ui.attempt import Attempt
from perilune.ui.provenance import stage_facts
from perilune.ui.view import view_folder

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
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "judged.yaml").write_text(RECIPE)
    for changes in (["judge.max_tokens=4"], ["judge.max_tokens=6"], ["name=other", "seed=1"]):
        command = [SCRIPT, "run", "judged.yaml", *(text for change in changes for text in ("--set", change))]
        subprocess.run(command, cwd=folder, env=environment(folder / "home"), check=True, capture_output=True)
    return folder / "home"


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    with pages(home) as address:
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


def test_provenance_names_the_key_that_signed_a_result(browser: Any, home: Path, url: str) -> None:
    page, errors = open_page(browser, f"{url}/experiments/judged#provenance", "#provenance table")
    cell = page.locator("#provenance table td .mono").last

    def said() -> str:
        page.reload()
        page.wait_for_selector("#provenance table")
        return str(cell.get_attribute("title"))

    key = read_public_key(home / "keys" / "controller.pub").keyid
    assert cell.inner_text() == f"key {key[:16]}"
    assert said() == f"key {key}"
    run = page.locator("#provenance table td .mono").first.inner_text()
    envelope = home / "runs" / run / "attestations" / "1" / "result.json"
    signed = envelope.read_text()
    other = next(path for path in home.glob("runs/*/attestations/1/result.json") if path != envelope)
    envelope.write_text(other.read_text())
    assert said() == f"not valid: it is about another attempt ({other.parents[2].name}/1)"
    document = json.loads(signed)
    envelope.write_text(json.dumps(document | {"payload": document["payload"].swapcase()}))
    assert said().startswith("not valid: ")
    envelope.unlink()
    assert said() == "not signed"
    envelope.write_text(signed)
    assert errors == []
    page.close()


def test_report_of_an_export_names_the_key(home: Path, tmp_path: Path) -> None:
    run = next(home.glob("runs/*"))
    command = [SCRIPT, "export", run.name, "--out", str(tmp_path / "export")]
    subprocess.run(command, env=environment(home), check=True, capture_output=True)
    view = view_folder(tmp_path / "export" / "bundle")
    attempt = Attempt(view.stages[0].attempt_dir)
    key = read_public_key(home / "keys" / "controller.pub").keyid
    assert ("Signed result", f"key {key}") in stage_facts(view.stages[0], attempt)
    (tmp_path / "export" / "attestations" / "result.json").unlink()
    assert ("Signed result", "not signed") in stage_facts(view.stages[0], attempt)
