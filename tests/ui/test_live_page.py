"""The live page in a browser: it follows a real run and stays usable after the run is killed."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from browser_cases import needs_browser
from live_home import LiveHome, pages, training, wait_for
from test_report_browser import PAYLOADS

from perilune.ui.live.app import LIST_SCRIPTS
from perilune.ui.report import render_page

pytestmark = needs_browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveHome]:
    with training(tmp_path_factory.mktemp("live")) as made:
        yield made


@pytest.fixture(scope="module")
def url(run: LiveHome) -> Iterator[str]:
    with pages(run.root) as address:
        yield address


def open_page(browser: Any, address: str, wanted: str, width: int = 1280) -> tuple[Any, list[str]]:
    """Open a page; returns it and the list of its console and page errors."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
    errors: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    page.wait_for_selector(wanted)
    return page, errors


def until(page: Any, expression: str) -> None:
    """Poll an expression. The page's security policy blocks Playwright's own `wait_for_function`."""
    wait_for(lambda: page.evaluate(expression), expression)


def wait_for_verdict(page: Any, status: str, finding: str) -> None:
    """Wait until the verdict contains `finding`, then check its status."""
    until(page, f"document.querySelector('#verdict').textContent.includes({json.dumps(finding)})")
    assert page.locator("#verdict strong").inner_text() == status


WIDE = """() => [...document.querySelectorAll("body *")]
  .filter((one) => one.getBoundingClientRect().right > 391 && !one.closest("#nav, .scroll, svg, .skip"))
  .map((one) => `${one.tagName} ${one.className}`)"""
FORGET_LENGTH = """() => {
  const rl = Data.training.find((one) => one.stage === "rl");
  delete rl.columns.length;
  rl.charts = rl.charts.filter((one) => one.key !== "length");
  redraw("steps rl");
}"""
CURVES = "[...document.querySelectorAll('#curves canvas')].map((one) => one.toDataURL()).join()"
LAST_STEP = "Data.training.find((one) => one.stage === 'rl').columns.step.at(-1)"


def test_live_page_reloads_for_the_first_episodes_of_a_stage(browser: Any, run: LiveHome, url: str) -> None:
    page, errors = open_page(browser, f"{url}/experiments/alive", ".detail h3")
    with page.expect_navigation():  # as if the page had been read before the first episode
        page.evaluate("Episodes.has = () => false")
    page.wait_for_selector(".detail h3")
    assert errors == []
    page.close()


def test_live_page_follows_the_newest_step_at_a_bounded_rate(browser: Any, run: LiveHome, url: str) -> None:
    page, errors = open_page(browser, f"{url}/experiments/alive", ".detail h3")
    loaded: list[str] = []
    page.on("request", lambda request: "/episodes/rl/" in request.url and loaded.append(request.url))
    first, since = run.steps(), time.monotonic()
    until(page, f"{LAST_STEP} >= {first + 12}")
    wait_for(lambda: page.evaluate("1") and len(loaded) >= 2, "two loads of a newest step")
    assert len(loaded) <= 1 + (time.monotonic() - since) / 5
    assert errors == []
    page.close()


def test_live_page_adds_points_and_survives_death_of_the_run(browser: Any, run: LiveHome, url: str) -> None:
    page, errors = open_page(browser, url, "a.experiment")
    assert "rl " in page.locator("a.experiment .when").inner_text()
    page.keyboard.press("Tab")
    page.locator("a.experiment").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-chart="rl-reward"] canvas')
    assert page.locator("#verdict strong").inner_text() in ("Healthy", "Watch", "Broken")
    until(page, "document.querySelector('.connection').textContent === 'connected'")

    written, since = run.steps(), time.monotonic()
    until(page, f"{LAST_STEP} >= {written}")
    assert time.monotonic() - since < 2
    assert page.locator(".progress").inner_text().startswith("rl")
    drawn = page.locator('[data-chart="rl-length"] canvas, [data-chart="rl-length"] p').first
    page.locator('[data-chart="rl-length"]').evaluate("one => one.scrollIntoView()")
    drawn.wait_for()
    page.evaluate(f"window.before = {CURVES}")
    until(page, f"{CURVES} !== window.before")
    assert drawn.count() == 1
    page.evaluate(FORGET_LENGTH)
    assert drawn.count() == 0
    until(page, "document.querySelector('[data-chart=\"rl-length\"]')")  # a late column adds its chart

    page.locator(".episode").nth(1).click()  # the URL names the open episode
    read = page.locator(".detail h3").first.inner_text()

    task = run.worker.children(recursive=True)
    for process in task:
        with suppress(psutil.NoSuchProcess):  # some processes are short-lived
            process.suspend()
    wait_for_verdict(page, "Broken", "Stall")
    for process in task:
        with suppress(psutil.NoSuchProcess):
            process.resume()
    until(page, "!document.querySelector('#verdict').textContent.includes('Stall')")

    run.kill()
    wait_for_verdict(page, "Broken", "No heartbeat")
    assert f"perilune retry {run.attempt.parents[1].name}" in page.locator("#verdict").inner_text()
    assert "left" not in page.locator(".progress").inner_text()  # no forecast for a dead run
    assert page.locator(".detail h3").first.inner_text() == read
    fragment = page.evaluate("location.hash")  # read it late, because the URL follows a click with a delay
    assert fragment.startswith("#episodes/rl/step%20")

    page.goto("about:blank")
    again, more = open_page(browser, f"{url}/experiments/alive{fragment}", ".detail h3")
    until(again, f"document.querySelector('.detail h3').textContent === {json.dumps(read)}")
    assert again.evaluate(LAST_STEP) == run.steps()  # every written step
    assert errors + more == []
    again.close()
    page.close()


def test_search_of_all_steps_opens_the_clicked_episode(browser: Any, run: LiveHome, url: str) -> None:
    page, errors = open_page(browser, f"{url}/experiments/alive", ".detail h3")
    page.get_by_label("all steps").check()
    page.get_by_label("Group", exact=True).fill("1/2")
    until(page, "document.querySelector('.list-head').textContent.includes('searched all')")
    assert page.locator(".list-head").inner_text().startswith("4 episodes · searched all ")
    assert all("step 1 · group 2" in text for text in page.locator(".episode").all_inner_texts())
    page.locator(".episode").nth(3).click()
    until(page, "document.querySelector('.detail h3').textContent === 'step 1 · group 2 · sample 3'")
    page.get_by_text("The same task in other steps").click()
    until(page, "document.querySelectorAll('.attempts .cell').length >= 4")
    assert "rl step 1" in page.locator(".attempts .name").all_inner_texts()
    until(page, "location.search.includes('task=open')")  # the page delays writes to its address
    address = page.evaluate("location.href")
    page.goto("about:blank")
    again, more = open_page(browser, address, ".attempts .strip")
    until(again, "document.querySelector('.list-head').textContent.startsWith('4 episodes')")
    assert again.locator(".detail h3").first.inner_text() == "step 1 · group 2 · sample 3"
    assert errors + more == []
    again.close()
    page.close()


def test_experiment_list_filters_by_name_and_comparison_page_opens(
    browser: Any, run: LiveHome, url: str
) -> None:
    page, errors = open_page(browser, f"{url}/?q=alive", "a.experiment")
    assert page.locator("a.experiment").count() == 1
    page.get_by_label("Search", exact=True).fill("nothing")
    assert page.locator("a.experiment").count() == 0
    until(page, "location.search === '?q=nothing'")
    page.get_by_label("Search", exact=True).fill("")
    page.locator("a.experiment").locator("xpath=../input").check()
    identity = httpx.get(f"{url}/experiments.json").json()["experiments"][0]["experiment_id"]
    until(page, f"location.search === '?compare={identity}'")
    page.goto(f"{url}/?compare={identity},../x")
    assert page.locator("li input:checked").count() == 1
    assert page.locator("a.plain").get_attribute("href") == f"/compare/{identity}"  # only known experiments
    page.goto(f"{url}/compare/{identity},{identity}")
    page.wait_for_selector("#arms table")
    page.locator(".brand").click()
    page.wait_for_selector("a.experiment")
    assert errors == []
    page.close()


def test_experiment_list_escapes_hostile_names(browser: Any) -> None:
    hostile = PAYLOADS[0]
    finding = {"name": hostile, "status": "broken", "since": None, "why": hostile, "remedy": hostile}
    health = {"stage": hostile, "state": "active", "status": "broken", "steps": 1, "findings": [finding]}
    stage = {"stage": hostile, "task": hostile, "run": hostile, "state": "active", "progress": None}
    stage |= {"health": health, "pass@1": None, "curve": {"name": hostile, "step": [1, 2], "value": [0, 1]}}
    entry = {
        "experiment_id": "01X",
        "name": hostile,
        "submitted": 0.0,
        "overrides": [hostile],
        "state": "active",
    }
    document = {"home": hostile, "older": 0, "experiments": [entry | {"health": health, "stages": [stage]}]}
    page = browser.new_page()
    html = render_page("Perilune", LIST_SCRIPTS, document, live=True)
    page.route("**/*", lambda route: route.fulfill(status=200, content_type="text/html", body=html))
    page.goto("http://localhost/")
    assert page.locator("a.experiment b").first.inner_text() == hostile
    assert hostile in page.locator("a.experiment .how").inner_text()
    assert page.locator("main img, [onerror]").count() == 0
    page.locator("a.experiment").locator("xpath=../input").focus()
    page.locator("input[type=search]").dispatch_event("input")  # draws the list again
    assert page.evaluate("document.activeElement.type") == "checkbox"
    assert page.evaluate("window.broken") is None
    page.close()


def test_live_pages_fit_a_phone_screen(browser: Any, run: LiveHome, url: str) -> None:
    for address, wanted in ((url, "a.experiment"), (f"{url}/runs/alive/rl", ".detail h3")):
        page, errors = open_page(
            browser, address.replace("/alive/rl", f"/{run.attempt.parents[1].name}"), wanted, 390
        )
        assert page.evaluate(WIDE) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert errors == []
        page.close()


def test_live_page_content_security_policy_blocks_foreign_scripts(run: LiveHome, url: str) -> None:
    answer = httpx.get(f"{url}/experiments/alive")
    policy = answer.text.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_live_server_refuses_foreign_hosts_and_unknown_paths(run: LiveHome, url: str) -> None:
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 403
    assert httpx.get(f"{url}/experiments/nothing").status_code == 404
    assert httpx.get(f"{url}/experiments/alive/episodes/nothing").status_code == 404
    assert httpx.get(f"{url}/experiments/alive/episodes/rl?reward=good").status_code == 422
    for name in ("..%2f..%2fjob", "step-999999", "%00"):
        assert httpx.get(f"{url}/experiments/alive/episodes/rl/{name}").status_code == 404
    assert httpx.post(f"{url}/experiments/alive").status_code == 405


def test_live_server_with_token_refuses_requests_without_it(run: LiveHome, tmp_path: Path) -> None:
    token = "a-token-of-enough-characters"
    with pages(run.root, "--token-env", "UI_TOKEN", UI_TOKEN=token) as guarded:
        refused = httpx.get(guarded)
        assert refused.status_code == 401
        assert 'name="token"' in refused.text
        assert httpx.post(f"{guarded}/token", data={"token": "wrong"}).status_code == 401
        assert httpx.get(guarded, headers={"authorization": f"Bearer {token}"}).status_code == 200
        with httpx.Client(base_url=guarded, follow_redirects=True) as client:
            assert client.post("/token", data={"token": token}).status_code == 200
            assert client.get("/experiments.json").json()["experiments"][0]["name"] == "alive"
            assert token not in str(dict(client.cookies))
