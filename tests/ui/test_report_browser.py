"""The report in a browser: charts, episode views, links, and hostile model output."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser_cases import needs_browser
from make_experiment import AFTER_SFT, TOKENIZER, SyntheticExperiment
from test_report_turns import episode as multi_turn_episode

from perilune.control.queries.comparison import Arm, Comparison, Difference, Member
from perilune.control.queries.lookup import StageStatus
from perilune.data.episode import Episode
from perilune.data.episodes_file import read_episodes, write_episodes
from perilune.data.spans import Span
from perilune.files import read_json_lines, write_json_lines
from perilune.metrics.across_seeds import compare_over_seeds
from perilune.metrics.bootstrap import Interval
from perilune.ui.experiment_comparison import build_comparison
from perilune.ui.report import build_report
from perilune.ui.view import ExperimentView

pytestmark = needs_browser

# The number of pixels of a canvas within one level of a color.
PAINTED = """(canvas, color) => {
  canvas.style.color = color;
  const wanted = getComputedStyle(canvas).color.match(/[\\d.]+/g).map(Number);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 250 && wanted.every((level, i) => Math.abs(level - data[at + i]) < 2)) count += 1;
  return count;
}"""


class Window:
    """A page that shows the report and records its errors and requests."""

    def __init__(self, page: Any, report: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console",
            lambda message: message.type in ("error", "warning") and self.errors.append(message.text),
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "dialog",
            lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()),
        )
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(report.as_uri())
        page.wait_for_selector("#footer:not(:empty)")
        page.wait_for_selector(".chart canvas, .chart .rows")

    def chart(self, key: str) -> Any:
        """The drawing of a chart, scrolled into view."""
        drawing = self.page.locator(f'[data-chart="{key}"] .chart-stage').first
        drawing.scroll_into_view_if_needed()
        return drawing

    def painted(self, key: str, color: int) -> int:
        """Number of pixels of a canvas that have one of the colors of series."""
        self.chart(key)
        return int(
            self.page.locator(f'[data-chart="{key}"] canvas').first.evaluate(PAINTED, f"var(--c{color})")
        )

    def crosshair(self, key: str) -> float:
        """Place of the crosshair in the plotting area, from 0 to 1; negative without one."""
        area = self.page.locator(f'[data-chart="{key}"] .u-over')
        cross, box = area.locator(".u-cursor-x").bounding_box(), area.bounding_box()
        return float((cross["x"] + cross["width"] - 1 - box["x"]) / box["width"]) if cross else -1.0

    def picture(self, key: str) -> str:
        """All pixels of a canvas."""
        return str(self.page.locator(f'[data-chart="{key}"] canvas').evaluate("one => one.toDataURL()"))

    def hover(self, key: str, across: float) -> str:
        """Move the pointer over a chart; returns the tooltip text."""
        box = self.chart(key).bounding_box()

        def move() -> None:
            self.page.mouse.move(0, 0)
            self.page.mouse.move(box["x"] + across * box["width"], box["y"] + box["height"] / 2)

        return self._tooltip_after(move)

    def press(self, chart: str, key: str) -> str:
        """Press a key on a chart; returns the tooltip text."""
        self.chart(chart).focus()
        return self._tooltip_after(lambda: self.page.keyboard.press(key))

    def _tooltip_after(self, act: Callable[[], None]) -> str:
        tooltip = self.page.locator(".tooltip")
        for _ in range(50):  # scrolling hides the tooltip when it ends
            act()
            self.page.wait_for_timeout(50)
            if tooltip.is_visible():
                break
        return str(tooltip.inner_text())

    def count(self, selector: str) -> int:
        """Number of elements that match."""
        return int(self.page.locator(selector).count())


@pytest.fixture(scope="module")
def report(experiment: ExperimentView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report(experiment, tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture(scope="module")
def window(browser: Any, report: Path) -> Iterator[Window]:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    yield Window(page, report)
    page.close()


def test_report_renders_without_errors_or_network_requests(window: Window, report: Path) -> None:
    assert window.errors == []
    assert window.requests == [report.as_uri()]
    assert window.page.locator("h1").inner_text().startswith("pass@1 rose from")
    assert window.page.locator("th", has_text="Right answer").count() == 1
    sections = [section.get_attribute("id") for section in window.page.query_selector_all("main > section")]
    assert sections == ["evaluations", "climb", "time", "curves", "episodes", "tasks", "provenance"]


@pytest.mark.parametrize(
    ("key", "marks", "least"),
    [
        ("differences", ".mark.whisker", 3),
        ("waterfall", ".mark.bar", 4),
        ("split", ".mark.bar", 12),
        ("split", ".lane.axis .tick", 3),
    ],
)
def test_row_charts_have_marks(window: Window, key: str, marks: str, least: int) -> None:
    assert window.count(f'[data-chart="{key}"] {marks}') >= least


@pytest.mark.parametrize(
    ("key", "colors"),
    [
        ("climb", [1, 2, 3]),
        ("difficulty", [1, 2, 7]),
        ("passk", [1, 2, 7]),
        ("rates", [1, 2, 7]),
        ("objective", [4]),
        ("lengths", [2]),
        ("sft-loss", [1]),
        ("rl-reward", [1]),
        ("rl-terms", [1]),
        ("rl-shares", [1, 2]),
        ("rl-gap", [1, 2]),
        ("rl-steptime", [1, 2, 5, 7]),
        ("cpu", [1, 7]),
    ],
)
def test_charts_draw_each_series_in_its_color(window: Window, key: str, colors: list[int]) -> None:
    assert [window.painted(key, color) > 10 for color in range(1, 9)] == [
        color in colors for color in range(1, 9)
    ]


def test_stage_tree_nests_stages_below_their_checkpoint(window: Window) -> None:
    below_sft = window.page.locator('.tree > li:has(> .state:text-is("sft"))')
    names = below_sft.locator("> ul > li > .state").all_inner_texts()
    assert names == ["after_sft", "rl"]
    assert "data from traces" in below_sft.locator("> small").inner_text()
    last = below_sft.locator(".tree .tree b").inner_text()
    assert last.startswith("pass@1 ") and last.endswith(" points against after_sft")


def test_curves_switch_between_steps_tokens_and_time(window: Window) -> None:
    rl = "Data.training.find((one) => one.stage === 'rl').columns"
    choice = window.page.get_by_label("Horizontal axis")
    choice.select_option("tokens")
    total = window.page.evaluate(f"{rl}.tokens.reduce((sum, one) => sum + one, 0)")
    assert f"tokens {total:,}\n" in window.hover("rl-reward", 0.94)
    choice.select_option("seconds")
    assert window.hover("rl-reward", 0.94).split("\n")[0].endswith(("s", "min"))
    choice.select_option("step")
    assert "step 12\n" in window.hover("rl-reward", 0.94)


def test_constant_metric_is_text_instead_of_a_chart(window: Window) -> None:
    assert window.page.locator('[data-chart="rl-staleness"] p').inner_text().startswith("0")
    assert window.count('[data-chart="rl-staleness"] canvas') == 0


def test_hover_shows_exact_values_and_crosshairs_on_linked_charts(window: Window) -> None:
    tooltip = window.hover("rl-reward", 0.94)
    rl = "Data.training.find((one) => one.stage === 'rl')"
    assert "step 12" in tooltip
    assert window.page.evaluate(f"Format.percent({rl}.columns.reward.at(-1))") in tooltip
    window.hover("rl-reward", 0.3)
    assert window.crosshair("rl-entropy") == pytest.approx(window.crosshair("rl-reward"), abs=0.01) != 1
    window.page.mouse.move(2, 2)
    assert not window.page.locator(".tooltip").is_visible()
    assert window.crosshair("rl-entropy") < 0


def test_arrow_keys_move_between_points(window: Window) -> None:
    assert "step 1\n" in window.press("rl-entropy", "Home")
    window.page.keyboard.press("ArrowRight")
    assert "step 2\n" in window.page.locator(".tooltip").inner_text()
    window.page.keyboard.press("Escape")
    assert not window.page.locator(".tooltip").is_visible()


def test_smoothing_and_log_scale_redraw(window: Window) -> None:
    exact, line = window.picture("sft-grad"), window.painted("sft-grad", 4)
    window.page.get_by_label("Smoothing").fill("0.9")
    assert window.picture("sft-grad") != exact
    assert 10 < window.painted("sft-grad", 4) < 0.8 * line  # the smooth line; the exact one is faint
    window.page.get_by_label("Smoothing").fill("0")
    assert window.picture("sft-grad") == exact
    window.page.locator('[data-chart="sft-grad"] button[aria-pressed]').click()
    assert window.picture("sft-grad") != exact and window.painted("sft-grad", 4) > 10
    wait_until(window.page, "location.search.includes('scale.sft-grad=log')")
    window.page.locator('[data-chart="sft-grad"] button[aria-pressed]').click()
    assert window.picture("sft-grad") == exact


def test_drag_zooms_all_linked_charts(window: Window) -> None:
    page = window.page
    box = window.chart("rl-reward").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.5 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], middle, steps=4)
    selection = page.locator('[data-chart="rl-reward"] .u-select').bounding_box()
    assert selection["width"] == pytest.approx(0.4 * box["width"], rel=0.2)
    page.mouse.up()
    first = int(window.press("rl-entropy", "Home").split()[1])
    assert 4 < first < 9
    page.keyboard.press("0")
    assert "step 1\n" in window.press("rl-entropy", "Home")
    page.keyboard.press("Escape")


# ------------------------------------------------------------------------------------------- episodes
def count_found(window: Window) -> int:
    return int(window.page.locator(".list-head").inner_text().split()[0].replace(",", ""))


def test_episodes_are_searched_filtered_and_sorted(window: Window) -> None:
    page = window.page
    page.get_by_label("Stage", exact=True).select_option("after_sft")
    everything = count_found(window)
    assert everything == 24 * 8
    page.get_by_label("Reward", exact=True).select_option("right")
    right = count_found(window)
    assert 0 < right < everything
    page.get_by_label("Strategy", exact=True).select_option("s:scratchpad")
    assert 0 < count_found(window) <= right
    page.get_by_label("Reward", exact=True).select_option("any")
    page.get_by_label("Strategy", exact=True).select_option("s:direct")
    page.get_by_label("Shortest length").fill("12")
    assert count_found(window) == 0
    page.get_by_label("Shortest length").fill("")
    page.get_by_label("Strategy", exact=True).select_option("")
    page.get_by_label("Group", exact=True).fill("0/3")
    assert count_found(window) == 8
    page.get_by_label("Group", exact=True).fill("")
    prompt = page.locator(".episode .asked").first.inner_text().strip()
    page.get_by_label("Search", exact=True).fill(prompt)
    assert count_found(window) == 8
    page.get_by_label("Search", exact=True).fill("")
    page.get_by_label("Order", exact=True).select_option("longest first")
    lengths = [int(text.split()[0]) for text in page.locator(".episode .meta:nth-child(3)").all_inner_texts()]
    assert lengths == sorted(lengths, reverse=True)
    page.get_by_label("Order", exact=True).select_option("as sampled")


def test_episode_detail_shows_tokens_and_the_group(window: Window) -> None:
    page = window.page
    page.get_by_label("Stage", exact=True).select_option("rl")
    page.locator(".episode").nth(1).click()
    written = page.locator(".episode[aria-current] .text").inner_text()
    tokens = page.locator(".tokens .token")
    answer = "".join(tokens.all_inner_texts())
    assert answer.endswith("<eos>")
    assert answer.removesuffix("<eos>") in written
    asked = page.locator(".detail .message, .detail .prose").first.inner_text()
    expected = page.locator(".detail h4:text-is('Right answer') + .prose").inner_text()
    assert sum(map(int, asked.strip().rstrip("=").split("+"))) == int(expected)
    tokens.nth(0).hover()
    tooltip = page.locator(".tooltip").inner_text()
    assert "log-prob" in tooltip
    assert '"7"' in tooltip  # the second most likely token
    assert "weights version 11" in tooltip
    assert page.locator(".siblings tbody tr").count() == 8
    page.locator(".siblings tbody button").nth(5).click()
    assert "sample 5" in page.locator(".detail h3").first.inner_text()


def test_matrix_shows_every_sample_of_a_step_and_opens_episodes(window: Window) -> None:
    page = window.page
    page.get_by_label("Stage", exact=True).select_option("rl")
    page.get_by_label("Step", exact=True).fill("3")
    assert page.locator(".strip").count() == 4
    assert page.locator(".strip .cell").count() == 4 * 8
    page.locator(".strip").nth(2).locator(".cell").nth(5).click()
    assert "group 2 · sample 5" in page.locator(".detail h3").first.inner_text()
    assert page.locator(".cell[aria-current]").count() == 1
    wait_until(page, "location.hash === '#episodes/rl/step%204/4%2F2%2F5'")  # written with a delay
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert "group 2 · sample 6" in page.locator(".detail h3").first.inner_text()
    page.get_by_label("Order of groups").select_option("lowest reward first")
    means = [float(text) for text in page.locator(".strip .mean").all_inner_texts()]
    assert means == sorted(means)


def test_url_opens_its_episode(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.goto(f"{report.as_uri()}#episodes/rl/step%204/4%2F2%2F5")
    page.wait_for_selector(".detail h3")
    assert "step 4 · group 2 · sample 5" in page.locator(".detail h3").first.inner_text()
    page.wait_for_timeout(500)  # charts above are drawn without moving the episodes
    assert abs(page.locator("#episodes").bounding_box()["y"]) < 100
    page.evaluate("location.hash = '#episodes/after_rl/samples/0%2F23%2F7'")
    page.wait_for_selector(".episode:nth-child(1)[aria-current] :text('group 23')")  # far down the list
    page.locator("#evaluations a.mono").first.click()
    page.wait_for_selector(".detail .reward.wrong")
    page.close()


def wait_until(window_or_page: Any, expression: str) -> None:
    """Poll an expression. The page's security policy blocks Playwright's own `wait_for_function`."""
    for _ in range(100):
        if window_or_page.evaluate(expression):
            return
        window_or_page.wait_for_timeout(50)
    raise AssertionError(expression)


def test_copied_url_restores_the_view(window: Window, browser: Any, report: Path) -> None:
    page = window.page
    page.goto(report.as_uri())
    page.get_by_label("Horizontal axis").select_option("tokens")
    window.press("rl-entropy", "End")
    page.keyboard.press("z")
    page.get_by_label("Smoothing").fill("0.5")
    page.get_by_label("Stage", exact=True).select_option("rl")
    page.get_by_label("all steps").check()
    page.get_by_label("Reward", exact=True).select_option("right")
    page.get_by_label("Order", exact=True).select_option("longest first")
    page.get_by_label("Search", exact=True).fill("1")
    page.locator(".episode").nth(2).click()
    page.wait_for_timeout(300)  # the URL is updated with a delay

    def view(shown: Any) -> list[str]:
        fields = ("Horizontal axis", "Smoothing", "Reward", "Order", "Search")
        values = [shown.get_by_label(name, exact=True).input_value() for name in fields]
        shown.locator('[data-chart="rl-entropy"]').scroll_into_view_if_needed()
        line = shown.locator('[data-chart="rl-entropy"] canvas')
        wait_until(shown, "document.querySelector('.detail h3')")
        texts = [shown.locator(selector).first.inner_text() for selector in (".list-head", ".detail h3")]
        return [
            *values,
            str(line.evaluate("one => one.toDataURL()")),
            *texts,
            str(shown.get_by_label("all steps").is_checked()),
        ]

    before = view(page)
    again = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    other = Window(again, report)
    again.goto(page.url)
    again.wait_for_selector(".detail h3")
    assert view(again) == before
    assert other.errors == []
    again.get_by_label("Horizontal axis").select_option("step")
    again.locator("#nav a").first.click()
    again.get_by_label("Horizontal axis").select_option("tokens")
    again.get_by_label("Reward", exact=True).select_option("wrong")
    again.wait_for_timeout(300)
    again.go_back()
    wait_until(again, "document.querySelector('[aria-label=\"Horizontal axis\"]').value === 'step'")
    assert again.get_by_label("Reward", exact=True).input_value() == "right"
    again.close()
    damaged = browser.new_page()
    window = Window(damaged, report)
    damaged.goto(
        f"{report.as_uri()}?axis=parsecs&zoom.training-rl=step~x&reward=good&sort=-pi#episodes/%/%E0"
    )
    damaged.wait_for_selector(".detail h3")
    assert damaged.get_by_label("Horizontal axis").input_value() == "step"
    assert damaged.get_by_label("Reward", exact=True).input_value() == "any"
    assert window.errors == []
    damaged.close()
    page.goto(report.as_uri())


def test_following_a_link_keeps_settings_that_are_not_in_the_address_yet(
    browser: Any, tmp_path: Path
) -> None:
    made = SyntheticExperiment(tmp_path)
    made.rl(steps=2, prompts=2)
    page = browser.new_page()
    Window(page, build_report(made.view(), tmp_path / "report.html"))
    page.evaluate(
        """() => {
            const link = document.createElement("a");
            link.href = "#episodes";
            document.body.append(link);
            Address.set("first", "1");
            Address.set("second", "2");
            link.click();
        }"""
    )
    wait_until(page, "location.hash === '#episodes'")
    wait_until(page, "location.search.includes('first=1') && location.search.includes('second=2')")


def test_episode_detail_shows_the_same_task_across_steps(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=6, prompts=2)
    for step in (2, 3, 6):
        path = root / "artifacts" / "episodes" / f"step-{step:06d}.parquet"
        episodes = read_episodes(path)
        write_episodes(
            path,
            [
                replace(
                    episode,
                    task_id=PAYLOADS[0],
                    reward=None if (step, index) == (2, 7) else float(index < step),
                )
                if index < 8
                else episode
                for index, episode in enumerate(episodes)
            ],
        )
    page = browser.new_page()
    window = Window(page, build_report(made.view(), tmp_path / "report.html"))
    page.locator(".cell").first.click()
    page.get_by_text("The same task in other steps").click()
    page.wait_for_selector(".attempts .strip")
    names = page.locator(".attempts .name").all_inner_texts()
    assert names == ["rl step 2", "rl step 3", "rl step 6"]
    assert page.locator(".attempts .mean").all_inner_texts() == ["0.29", "0.38", "0.75"]
    assert "rl: 11 of 24 right in 3 steps." in page.locator(".detail").inner_text()
    assert window.painted("attempts-rl", 1) > 3 * 40  # a line and three points
    told = page.locator('[data-chart="attempts-rl"] .chart-stage').get_attribute("aria-label")
    assert "pass rate from 28.6% to 75.0%" in told  # an answer without a score is not wrong
    page.locator(".attempts .strip").nth(1).locator(".cell").nth(5).click()
    wait_until(page, "document.querySelector('.detail h3').textContent === 'step 3 · group 0 · sample 5'")
    wait_until(page, "document.querySelectorAll('.attempts .strip').length === 3")  # it stays open
    page.go_back()
    wait_until(page, "document.querySelector('.detail h3').textContent.startsWith('step 6')")
    assert window.errors == []
    page.close()


def test_two_episodes_compare_side_by_side_with_their_own_url(
    window: Window, browser: Any, report: Path
) -> None:
    page = window.page
    page.get_by_label("Stage", exact=True).select_option("rl")
    page.get_by_label("Step", exact=True).fill("3")
    page.locator(".strip").nth(2).locator(".cell").nth(5).click()
    wait_until(page, "location.hash === '#episodes/rl/step%204/4%2F2%2F5'")
    title, own = page.locator(".detail h3").first.inner_text(), page.evaluate("location.hash")
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Step", exact=True).fill("1")
    page.locator(".strip").nth(1).locator(".cell").nth(0).click()
    titles = [text for text in page.locator(".detail h3").all_inner_texts() if text.startswith("step")]
    assert titles[0] == title
    assert title.startswith("step 4 · group")
    (chosen,) = titles[1:]
    assert chosen.startswith("step 2 · group")
    left, right = (page.locator(".detail > div").nth(column).bounding_box() for column in (0, 1))
    assert left["x"] + left["width"] <= right["x"]
    wait_until(page, "location.hash.startsWith('#episodes/rl/step%202/2%2F1%2F0/')")
    address = page.evaluate("location.hash")
    assert address.endswith(own.removeprefix("#episodes"))
    again = browser.new_page()
    again.goto(f"{report.as_uri()}{address}")
    again.wait_for_selector(".detail > div h3")
    texts = [text for text in again.locator(".detail h3").all_inner_texts() if text.startswith("step")]
    assert texts == titles
    again.close()
    page.get_by_role("button", name="Put away").click()
    assert page.locator(".detail h3").first.inner_text() == chosen


def sub_agents(episode: Episode) -> Episode:
    """Add two concurrent sub-agents to an episode; its player used their answers."""
    talk = ({"role": "user", "content": PAYLOADS[0]}, {"role": "assistant", "content": PAYLOADS[1]})
    spans = (
        Span("0", "agent", (0, 3), -1, 40, 12, 3),
        Span("0.0", "ask", (1,), 3, 9, 4, 3, talk),
        Span("0.1", "ask", (1, 2), -1, 9, 7, 3, talk),
    )
    versions = np.array([2, *[3] * (len(episode.token_ids) - 1)], np.int32)
    rewards = np.full(len(episode.token_ids), np.nan, np.float32)
    rewards[[0, -1]] = -0.5, 1.0
    return replace(episode, spans=spans, policy_version=versions, step_rewards=rewards)


def test_token_colors_offer_recorded_metrics_and_sub_agents_are_lanes(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.rl(steps=1, prompts=2)
    path = root / "artifacts" / "episodes" / "step-000001.parquet"
    write_episodes(path, [sub_agents(episode) for episode in read_episodes(path)])
    page = browser.new_page()
    window = Window(page, build_report(made.view(), tmp_path / "report.html"))
    page.locator(".cell").first.click()
    color = page.get_by_label("Color of tokens")
    offered = color.locator("option").all_inner_texts()
    others = ["step reward", "policy version"]
    assert [option for option in offered if option != "advantage"] == [
        "probability",
        "entropy",
        "KL to the reference",
        *others,
    ]

    def tint(place: int) -> str:
        token = page.locator(".tokens .token").nth(place)
        return str(token.evaluate("(one) => one.style.getPropertyValue('--tint')"))

    def depth(place: int) -> float:
        token = page.locator(".tokens .token").nth(place)
        return float(str(token.evaluate("(one) => one.style.getPropertyValue('--depth')")).rstrip("%"))

    color.select_option("KL to the reference")
    assert [tint(0), tint(1)] == [
        "var(--c2)",
        "var(--c3)",
    ]  # less and more likely than under the reference model
    color.select_option("entropy")
    first = read_episodes(path)[0]
    shares = [*np.exp(first.top_logprobs[0]).tolist()]
    shares.append(1 - sum(shares))
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    page.locator(".tokens .token").first.hover()
    text = page.locator(".tooltip-row", has_text="entropy").locator("b").inner_text()
    assert float(text.removesuffix(" nats")) == pytest.approx(entropy, abs=0.002)
    assert depth(0) == pytest.approx(min(72, 100 * entropy / 3), abs=0.1)
    color.select_option("step reward")
    assert [tint(0), tint(1)] == ["var(--c2)", "var(--c3)"]  # negative, then positive step reward
    badges = page.locator(".tokens .token + .reward")
    assert badges.all_inner_texts() == ["−0.5", "+1"]  # each after the segment that earned it
    color.select_option("policy version")
    assert [tint(0), tint(1)] == ["var(--c3)", "var(--c4)"]
    page.locator(".cell").nth(1).click()
    assert color.input_value() == "policy version"  # the choice stays

    assert page.locator(".lanes h4").inner_text() == "5 turns in 4 critical steps"
    assert window.count('[data-chart="spans"] .mark.bar') == 5 + 1  # five turns and one wait
    told = page.locator('[data-chart="spans"] .row')
    told.nth(0).hover()
    assert page.locator(".tooltip-row", has_text="used").count() == 0  # the agent itself has no parent
    told.nth(1).hover()
    assert page.locator(".tooltip-row", has_text="used").inner_text() == "used\nin round 4"
    told.nth(2).hover()
    assert page.locator(".tooltip-row", has_text="used").inner_text() == "used\nby no turn"
    page.locator(".lanes summary").first.click()
    assert PAYLOADS[1] in page.locator(".lanes .prose").first.inner_text()
    assert page.evaluate("window.broken") is None
    assert window.errors == []
    page.close()


def test_click_on_curve_opens_the_episodes_of_that_step(window: Window) -> None:
    window.hover("rl-reward", 0.9)  # wait for scrolling to end
    box = window.chart("rl-reward").bounding_box()
    window.page.mouse.click(box["x"] + box["width"] - 24, box["y"] + 60)
    wait_until(window.page, "document.querySelector('.detail h3').textContent.startsWith('step 12')")
    window.page.get_by_label("Step", exact=True).fill("0")
    assert "step 1 " in window.page.locator(".detail h3").first.inner_text()


# --------------------------------------------------------------------------------------------- scheme
def test_theme_follows_the_system_and_the_toggle(browser: Any, report: Path) -> None:
    page = browser.new_page(color_scheme="dark", viewport={"width": 390, "height": 844})
    window = Window(page, report)

    def ground() -> int:
        return int(page.evaluate("Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"))

    assert ground() < 40
    page.locator("#theme").click()
    assert page.locator("#theme").inner_text() == "theme: light"
    assert ground() > 240
    page.locator("#theme").click()
    assert ground() < 40
    assert page.evaluate("document.documentElement.scrollWidth") <= 390  # nothing overflows a phone
    assert window.errors == []
    page.close()


# -------------------------------------------------------------------------------------------- hostile
PAYLOADS = (
    "<img src=x onerror='window.broken = 1'>",
    "</script><script>window.broken = 1</script>",
    "<svg onload='window.broken = 1'><!--",
    "javascript:window.broken=1",
)


def test_model_output_is_shown_and_never_executed(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.evaluate("base", "model", AFTER_SFT, 6)
    path = root / "artifacts" / "episodes" / "step-000000.parquet"
    episodes = read_episodes(path)
    for index, episode in enumerate(episodes):
        text = PAYLOADS[index % len(PAYLOADS)]
        episodes[index] = replace(
            episode,
            messages=({"role": text, "content": text}, {"role": "assistant", "content": text}),
            task_id=text,
            metrics={f"strategy/{text}": 1.0},
            reward_terms={text: 1.0},
        )
    write_episodes(path, episodes)
    view = made.view()
    stage = replace(view.stages[0], name=PAYLOADS[0], state="failed", cause=PAYLOADS[1])
    hostile = ExperimentView(PAYLOADS[0], 0, PAYLOADS[1], (stage,))
    page = browser.new_page()
    window = Window(page, build_report(hostile, tmp_path / "report.html"))
    for index in range(len(PAYLOADS)):
        page.locator(".episode").nth(index).click()
        assert PAYLOADS[index] in page.locator(".detail").inner_text()
    for element in page.locator(".chart-stage").all():
        element.focus()
        page.keyboard.press("ArrowRight")
    assert page.evaluate("window.broken") is None
    assert page.locator("main img, main svg[onload], [onerror]").count() == 0
    assert window.errors == []
    assert len(window.requests) == 1
    page.close()


def test_report_renders_empty_stage_and_curves_of_one_point(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    made.begin("sft", "sft", {"checkpoint": "model"})
    root = made.rl(steps=9, prompts=1, until=1)  # every curve has one point
    made.fail(root, "no space is left on the disk", 3.0)
    page = browser.new_page()
    window = Window(page, build_report(made.view(), tmp_path / "report.html"))
    assert page.locator(".notice.failed").inner_text().startswith("Stage rl failed.")
    assert window.painted("rl-reward", 1) > 15  # a point
    assert window.errors == []
    page.close()


def test_report_thins_curves_of_thousands_of_points(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.begin("sft", "sft", {"checkpoint": "model", "steps": 20_000})
    lines = "".join(f'{{"step": {step}, "loss": {1 + 1 / step}, "lr": 0.1}}\n' for step in range(1, 20_001))
    (root / "artifacts" / "metrics.jsonl").write_text(lines)
    page = browser.new_page()
    window = Window(page, build_report(made.view(), tmp_path / "report.html"))
    assert window.painted("sft-loss", 1) > 200
    assert "every 10th of 20000 steps" in page.locator("#curves").inner_text()
    assert window.errors == []
    page.close()


def test_evaluation_is_a_point_and_not_said_to_hold_at_every_step(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    root = made.begin("sft", "sft", {"checkpoint": "model", "steps": 9})
    measured = {
        f"eval/heldout/pass@1{end}": value for end, value in (("", 0.1), ("/low", 0.0), ("/high", 0.2))
    }
    rows = [{"step": 0, **measured}, *({"step": step, "loss": 1 / step} for step in range(1, 5))]
    write_json_lines(root / "artifacts" / "metrics.jsonl", rows)
    page = browser.new_page()
    window = Window(page, build_report(made.view(), tmp_path / "report.html"))
    assert window.painted("sft-held-out", 3) > 30  # a point and its interval
    assert "at every step" not in page.locator("#curves").inner_text()
    page.close()


def test_best_checkpoint_is_marked_on_the_climb_and_on_curves(
    window: Window, browser: Any, tmp_path: Path
) -> None:
    legend = window.page.locator('[data-chart="climb"] .legend-item', has_text="best")
    assert legend.inner_text() == "best: after rl"
    assert window.page.locator('[data-chart="climb"] .swatch.ring').count() == 1
    made = SyntheticExperiment(tmp_path)
    for stage, chosen in (("sft", None), ("more", "data/loss")):
        root = made.begin(stage, "sft", {"checkpoint": "model", "steps": 9, "eval": {"best": chosen}})
        measured = [(0, 0.1, 3.0), (3, 0.4, 2.0), (6, 0.4, 1.0), (9, 0.2, 2.0)]
        ends = ("", "/low", "/high")
        rows = [
            {"step": step, "loss": 1.0 + step}
            | {f"eval/heldout/pass@1{end}": rate for end in ends}
            | {f"eval/data/loss{end}": loss for end in ends}
            for step, rate, loss in measured
        ]
        write_json_lines(root / "artifacts" / "metrics.jsonl", rows)
    page = browser.new_page()
    other = Window(page, build_report(made.view(), tmp_path / "report.html"))
    marks = {
        key: page.locator(f'[data-chart="{key}"] .legend-item', has_text="best").all_inner_texts()
        for key in ("sft-held-out", "sft-loss", "more-held-out", "more-loss")
    }
    assert marks == {
        "sft-held-out": ["best: step 3"],  # the earlier of two equals
        "sft-loss": [],
        "more-held-out": [],
        "more-loss": ["best: step 6"],
    }
    assert other.painted("sft-held-out", 3) and other.painted("more-held-out", 3)
    assert other.picture("sft-held-out") != other.picture("more-held-out")  # the ring
    assert other.errors == []
    page.close()


def test_time_of_steps_shows_cache_hits_and_sizes_of_weight_updates(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    timings = made.rl(steps=4, prompts=1) / "artifacts" / "timings.jsonl"
    rows = list(read_json_lines(timings))
    write_json_lines(timings, [row | {"prefix_hits": 0.25, "weights_bytes": 2.5e6} for row in rows])
    made.rl(steps=4, prompts=1, name="other")
    page = browser.new_page()
    window = Window(page, build_report(made.view(), tmp_path / "report.html"))
    keys = ("rl-prefix-hits", "rl-weights", "other-prefix-hits", "other-weights")
    legends = [page.locator(f'[data-chart="{key}"] .legend-item').all_inner_texts() for key in keys]
    assert legends == [["prompt tokens in the cache\n25.0%"], ["last update\n2.5 MB"], [], []]
    assert window.painted("rl-prefix-hits", 4) > 20 and window.painted("rl-weights", 6) > 20
    assert window.errors == []
    page.close()


def test_lengths_by_policy_age_are_charted_for_stale_answers(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    for stage in ("rl", "fresh"):
        root = made.rl(steps=2, prompts=1, name=stage)
        metrics = root / "artifacts" / "metrics.jsonl"
        write_json_lines(metrics, [row | {"staleness_max": 3.0} for row in read_json_lines(metrics)])
    lengths: dict[int, list[int]] = {0: [], 3: []}
    for path in sorted((tmp_path / "runs" / "01SYNTHETICRL").rglob("step-*.parquet")):
        episodes = read_episodes(path)
        for index, one in enumerate(episodes):
            versions = np.full(len(one.token_ids), 5, np.int32)
            age = 3 if index % 4 == 0 else 0
            versions[: len(versions) // 2 + 1] -= age  # the weights changed while it was sampled
            lengths[age].append(len(versions))
            episodes[index] = replace(one, policy_version=versions)
        write_episodes(path, episodes)
    page = browser.new_page()
    window = Window(page, build_report(made.view(), tmp_path / "report.html"))
    assert window.count('[data-chart="ages-fresh"]') == 0  # all answers of a step have the same age
    assert window.painted("ages-rl", 4) > 500
    for place, (age, found) in zip(("Home", "End"), lengths.items(), strict=True):
        told = window.press("ages-rl", place)
        mean = sum(found) / len(found)
        assert told.split("\n") == [f"{age} updates, {len(found)} answers", "mean tokens", f"{mean:.4g}"]
    assert window.errors == []
    page.close()


def make_comparison(folder: Path) -> Comparison:
    """Two arms with curves and three seeds each; the first arm has a hostile label."""
    arms = []
    for index, label in enumerate(("<img src=x>", "rl.lr=3e-05")):
        members = []
        tasks = {"easy": 1.0, "<img src=y>": 0.5 - index / 4, "gained": float(index)}
        for seed in range(3):
            attempt = folder / f"{index}-{seed}"
            rows = [{"step": step, "reward": 0.1 * step + index + 0.01 * seed} for step in range(1, 9)]
            write_json_lines(attempt / "artifacts" / "metrics.jsonl", rows)
            stage = StageStatus(
                "X", "words", "rl", "rl", attempt.name, "succeeded", "", "", 1, attempt, "", "", "", 0.0, 1.0,
                None, {},
            )  # fmt: skip
            members.append(Member(attempt.name, seed, (stage,), Interval(0.3 + index / 9, 0.2, 0.5), tasks))
        difference = Difference(compare_over_seeds({"b": [0.1, 0.12, 0.11]})["b"], None, 0) if index else None
        arms.append(
            Arm(label, {"rl.lr": index}, tuple(members), Interval(0.3 + index / 9, 0.2, 0.5), difference)
        )
    return Comparison("words-1", "after.pass@1", ("rl.lr",), tuple(arms), 0)


def test_turns_show_the_step_rewards_that_they_earned(browser: Any, tmp_path: Path) -> None:
    made = SyntheticExperiment(tmp_path)
    path = made.rl(steps=1, prompts=2) / "artifacts" / "episodes" / "step-000001.parquet"
    asked = multi_turn_episode()
    rewards = np.full(len(asked.token_ids), np.nan, np.float32)
    rewards[[1, 3, 10]] = 0.5, -0.125, -1.0
    text = "7" * 25_000  # too long to show by token
    messages = (*asked.messages[:-1], {"role": "assistant", "content": text})
    ids = np.array([*asked.token_ids[:8], *TOKENIZER.encode_completion(text)], np.int32)
    long = {"loss_mask": np.array([*asked.loss_mask[:8], *[True] * (len(ids) - 8)]), "messages": messages}
    versions, zeros = np.zeros(len(ids), np.int32), np.zeros(len(ids), np.float32)
    earned = np.concatenate([rewards[:8], np.full(len(ids) - 8, np.nan, np.float32)])
    long |= {"token_ids": ids, "logprobs": zeros, "policy_version": versions, "step_rewards": earned}
    episodes = [replace(asked, step_rewards=rewards), replace(asked, episode_id="1/0/1", **long)]
    write_episodes(path, episodes)
    page = browser.new_page()
    window = Window(page, build_report(made.view(), tmp_path / "report.html"))
    heads = page.locator(".detail .role")
    assert page.locator(".tokens").count() == 1
    assert heads.all_inner_texts()[-3:] == ["assistant earned +0.375", "tool", "assistant earned −1"]
    page.get_by_role("button", name="Read sample 1").click()
    page.locator(".detail .prose .role", has_text="+0.375").wait_for()
    assert heads.all_inner_texts()[-3:] == ["assistant earned +0.375", "tool", "assistant"]
    assert window.errors == []
    page.close()


def test_comparison_page_renders_without_errors(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    window = Window(page, build_comparison(make_comparison(tmp_path), tmp_path / "page.html"))
    assert window.errors == [] and len(window.requests) == 1
    sections = [section.get_attribute("id") for section in page.query_selector_all("main > section")]
    assert sections == ["arms", "curves", "tasks", "experiments"]
    page.get_by_label("Right").select_option("1-2")
    rows = page.locator("#tasks tbody tr").all_inner_texts()
    assert rows == ["gained\t0.0%\t100.0%", "<img src=y>\t50.0%\t25.0%", "easy\t100.0%\t100.0%"]
    assert window.count("#tasks a") == 0  # this file has no episodes
    assert window.painted("rl-reward", 1) > 100 and window.painted("rl-reward", 2) > 100
    assert window.count('[data-chart="differences"] .mark.whisker') == 1
    assert window.count("main img") == 0 and "<img src=x>" in page.locator("main").inner_text()
    assert "rl.lr=3e-05" in window.hover("rl-reward", 0.5)
    page.close()
