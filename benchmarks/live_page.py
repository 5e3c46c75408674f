"""Measure the live page: the delay of a point, the cost to training, and the paint time of a long run.

    python benchmarks/live_page.py [--seconds 30] [--steps 10000] [--pairs 20]

A real run trains a tiny model while Chromium shows its page. The long run repeats the lines and the episodes
of that run. Needs Chromium. Writes results/live_page.json.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "live_page.json"
EPISODES = 100  # in each step of the long run
ABOUT = """\
The columns of the tables:

* *Delay* is the time from the line in `metrics.jsonl` to the point on the page.
* *Server, share of a core* is the CPU time of the page's server per second, with one page open.
* *Slow-down* is the increase of a training step's CPU time while a client reads the page without drawing it.
  Each pair measures four seconds without the client, then four seconds with it. The table gives the mean over
  pairs with its 95% interval.
* *Telemetry* is the CPU time of the worker's heartbeats and hardware samples, as a share of the CPU time of
  training.
* *First paint* is the browser's own measurement for a run with many steps and episodes. It includes the
  server's work.
* *Filter* is the time from a key in the search field to the list of matching episodes of the open step.
* *Another step* is the time to open the episodes of another step.
* *First search of all steps* reads every episode file and makes an index. *Filter of all steps* is the time
  from the choice of a reward to the last matches in the whole run, with this index. *Search for a word* reads
  all texts. While it searches, the page shows the matches so far.

Other programs used the machine, so CPU times are more reliable than elapsed times."""
sys.path[:0] = [str(ROOT / "tests" / "ui")]


@contextmanager
def chromium() -> Any:
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


def servers() -> list[psutil.Process]:
    """The servers of pages that this process started."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "ui" in process.cmdline()[1:4]]


def watched(browser: Any, url: str, run: Any, seconds: float) -> dict[str, Any]:
    """Delays of points, and CPU time of the server, while a page shows an active run."""
    page = browser.new_page()
    page.goto(f"{url}/experiments/alive")
    page.wait_for_selector('[data-chart="rl-reward"]')
    last = "Data.training.find((one) => one.stage === 'rl').columns.step.at(-1)"
    (server,) = servers()
    used = sum(server.cpu_times()[:2])
    began, first = time.monotonic(), run.steps()
    delays = []
    while time.monotonic() - began < seconds:
        written, since = run.steps(), time.monotonic()
        while page.evaluate(last) < written:
            time.sleep(0.01)
        delays.append(time.monotonic() - since)
        time.sleep(0.3)
    elapsed = time.monotonic() - began
    page.close()
    return {
        "steps per second of the run": round((run.steps() - first) / elapsed, 2),
        "median delay, seconds": round(statistics.median(delays), 3),
        "longest delay, seconds": round(max(delays), 3),
        "server, share of a core": round((sum(server.cpu_times()[:2]) - used) / elapsed, 4),
    }


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Read a page and its stream without drawing it, as a browser on another machine does."""
    page = httpx.get(url, timeout=60)
    assert page.status_code == 200

    def follow() -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.stream("GET", f"{url}/events", timeout=60) as events:
            for _ in events.iter_raw():
                if ended.is_set():
                    return

    ended = threading.Event()
    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def slowed(url: str, run: Any, pairs: int, seconds: float = 4.0) -> dict[str, Any]:
    """CPU time of a training step with an open page and without one, in alternating spans."""
    from perilune.metrics.across_seeds import t_interval

    (task,) = run.worker.children()

    def used(process: psutil.Process) -> float:
        return sum(process.cpu_times()[:2])

    def a_step() -> float:
        before, first = used(task), run.steps()
        time.sleep(seconds)
        return (used(task) - before) / (run.steps() - first)

    began, worker = used(task), used(run.worker)
    changes = []
    for _ in range(pairs):
        without = a_step()
        with reading(f"{url}/experiments/alive"):
            changes.append(a_step() / without - 1)
    interval = t_interval(changes)
    return {
        "pairs": pairs,
        **{f"slow-down, percent, {name}": round(100 * interval[name], 1) for name in ("mean", "low", "high")},
        "telemetry, share of training": round((used(run.worker) - worker) / (used(task) - began), 4),
    }


def lengthen(attempt: Path, steps: int) -> None:
    """Make a dead run long: repeat its lines, and give each step an episode file of `EPISODES` episodes."""
    from perilune.data.episodes_file import read_episodes, write_episodes

    artifacts = attempt / "artifacts"
    for name in ("metrics", "timings"):
        path = artifacts / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        lines = (json.dumps(rows[step % len(rows)] | {"step": step + 1}) for step in range(steps))
        path.write_text("".join(f"{line}\n" for line in lines))
    first = artifacts / "episodes" / "step-000001.parquet"
    own = read_episodes(first)
    many = [own[index % len(own)] for index in range(EPISODES)]
    for path in artifacts.glob("episodes/*.parquet"):
        path.unlink()
    write_episodes(first, many)
    for step in range(2, steps + 1):
        os.link(first, first.with_name(f"step-{step:06d}.parquet"))


def opened(browser: Any, url: str) -> float:
    """Seconds to the first paint of a page in a new window."""
    page = browser.new_page()
    page.goto(url)
    page.wait_for_selector(".detail h3")
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.close()
    return float(painted) / 1000


SEARCH = """([text]) => new Promise((resolve) => {
  const field = document.querySelector('#episodes input[aria-label="Search"]');
  const before = performance.now();
  field.value = text;
  field.dispatchEvent(new Event("input"));
  // The episodes of the step are loaded, so the next frame has the list, also if no row changes.
  requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - before)));
})"""
BROWSE = """([step]) => new Promise((resolve) => {
  const slider = document.querySelector('#episodes input[type="range"]');
  const before = performance.now();
  new MutationObserver(() => resolve(performance.now() - before))
    .observe(document.querySelector(".episode-list ol"), { childList: true });
  slider.value = step;
  slider.dispatchEvent(new Event("input"));
})"""


def read(browser: Any, url: str, steps: int) -> dict[str, float]:
    """Seconds to filter the episodes of a step, to read another step, and to search all steps."""
    page = browser.new_page()
    page.goto(url)
    page.wait_for_selector(".detail h3")
    page.wait_for_timeout(2000)
    filters = [page.evaluate(SEARCH, [text]) for text in ("1", "12", "x", "")]
    others = [page.evaluate(BROWSE, [step]) for step in range(7, steps, steps // 8)]
    searches = search_all_steps(page)
    page.close()
    return {
        "filter, longest of 4, seconds": round(max(filters) / 1000, 3),
        "another step, median of 8, seconds": round(statistics.median(others) / 1000, 3),
        **{f"{name}, seconds": round(seconds, 2) for name, seconds in searches.items()},
    }


def search_all_steps(page: Any) -> dict[str, float]:
    """Seconds from a change of a field to the report on all steps. The first search makes the index."""
    status = page.locator("#episodes [role=status]", has_text="searched all")
    reward, words = page.get_by_label("Reward", exact=True), page.get_by_label("Search", exact=True)

    def timed(change: Callable[[], object]) -> float:
        began = time.monotonic()
        change()
        status.wait_for(timeout=600_000)
        return time.monotonic() - began

    first = timed(page.get_by_label("all steps").check)
    filters = [timed(partial(reward.select_option, kind)) for kind in ("wrong", "right", "failed", "any")]
    return {
        "first search of all steps": first,
        "filter of all steps, longest of 4": max(filters),
        "search for a word in all steps": timed(partial(words.fill, "12")),
    }


def measure(seconds: float, steps: int, pairs: int) -> dict[str, Any]:
    """Measure all figures."""
    from live_home import pages, training

    with tempfile.TemporaryDirectory() as folder, chromium() as browser, training(Path(folder)) as run:
        with pages(run.root) as url:
            live = watched(browser, url, run, seconds)
            slow = slowed(url, run, pairs)
        run.kill()
        lengthen(run.attempt, steps)
        with pages(run.root) as url:
            (server,) = servers()
            used = sum(server.cpu_times()[:2])
            paints = [opened(browser, f"{url}/experiments/alive") for _ in range(5)]
            per_page = (sum(server.cpu_times()[:2]) - used) / len(paints)
            filtered = read(browser, f"{url}/experiments/alive", steps)
            lists = [opened_list(browser, url) for _ in range(5)]
    return {
        "watching a run": [live],
        "training beside a page": [slow],
        "a long run": [
            {
                "steps": steps,
                "episodes": steps * EPISODES,
                "first paint, median of 5, seconds": round(statistics.median(paints), 2),
                "server, CPU seconds per page": round(per_page, 2),
                "first paint of the list, seconds": round(statistics.median(lists), 2),
            }
        ],
        "reading the long run": [filtered],
    }


def opened_list(browser: Any, url: str) -> float:
    """Seconds to the first paint of the list of experiments."""
    page = browser.new_page()
    page.goto(url)
    page.wait_for_selector("a.experiment")
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.close()
    return float(painted) / 1000


def main() -> None:
    """Measure all figures, and write the result."""
    from perilune.bundle.machine import describe_machine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    options = f"--seconds {arguments.seconds:g} --steps {arguments.steps} --pairs {arguments.pairs}"
    document = {
        "title": "Delay and cost of the live page",
        "about": ABOUT,
        "command": f"python benchmarks/live_page.py {options}",
        **measure(arguments.seconds, arguments.steps, arguments.pairs),
        "machine": describe_machine(),
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(
        json.dumps(
            {
                name: document[name]
                for name in ("watching a run", "training beside a page", "a long run", "reading the long run")
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
