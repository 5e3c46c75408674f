"""What long work looks like, on a terminal and in a log file."""

import io

import pytest

from perilune.cli.console import LiveBars, PlainLines, figure, figures_text, stage_progress
from perilune.cli.units import duration


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("reward", 0.53125, "reward 0.531"),
        ("pass_rate", 0.481, "pass rate 48.1%"),
        ("pass@1", 0.5, "pass@1 50.0%"),
        ("tokens_per_second", 12345.6, "12,346 tokens/s"),
        ("loss", 1.23456, "loss 1.23"),
        ("tokens", 123456.0, "tokens 123,456"),
    ],
)
def test_a_figure_in_words(name: str, value: float, text: str) -> None:
    assert figure(name, value) == text


def test_the_figures_that_matter_come_first() -> None:
    text = figures_text({"length": 5.0, "tokens_per_second": 10.0, "pass_rate": 0.5, "reward": 0.5})
    assert text == "reward 0.5, pass rate 50.0%, 10 tokens/s, length 5"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3725, "1:02:05")]
)
def test_a_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Clock:
    """Time that passes when told."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_lines_come_every_few_seconds_with_figures_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("perilune.cli.console.time", clock)
    out = io.StringIO()
    with PlainLines(out, interval=5.0) as view:
        view.started("rl", "stage 1 of 2")
        for done in range(1, 13):
            clock.now += 1.0
            view.progressed("rl", done, 60, "steps", {"reward": 0.5})
        view.ended("rl", "done", "0:12")
    assert out.getvalue().splitlines() == [
        "[rl] started, stage 1 of 2",
        "[rl] 5/60 steps, reward 0.5, 0:55 left",
        "[rl] 10/60 steps, reward 0.5, 0:50 left",
        "[rl] done, 0:12",
    ]


def test_a_stage_that_was_resumed_has_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work done before this command began says nothing about the time that is left."""
    clock = Clock()
    monkeypatch.setattr("perilune.cli.console.time", clock)
    out = io.StringIO()
    view = PlainLines(out, interval=0.0)
    view.progressed("rl", 50, 60, "steps", {})
    clock.now += 2.0
    view.progressed("rl", 51, 60, "steps", {})
    assert out.getvalue().splitlines()[-1] == "[rl] 51/60 steps, 0:18 left"


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_bars_and_anything_else_lines() -> None:
    assert isinstance(stage_progress(Terminal()), LiveBars)
    assert isinstance(stage_progress(io.StringIO()), PlainLines)


def test_bars_show_each_stage_once_with_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with LiveBars(out) as view:
        view.ended("traces", "reused", "finished before")
        view.started("rl", "stage 2 of 2")
        view.progressed("rl", 30, 60, "steps", {"reward": 0.5})
        view.say("[rl] attempt 2 takes over")
        view.ended("rl", "failed", "out_of_memory")
    last = out.getvalue().rpartition("takes over")[2]
    assert "attempt 2 takes over" in out.getvalue()
    assert "finished before" in last
    assert "30/60 steps" in last
    assert "out_of_memory" in last
    assert "✗" in last


def test_what_others_named_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with LiveBars(out) as view:
        view.started("rl", "")
        view.progressed("rl", 1, 2, "[/bold]", {"a [/] b\x1b]0;x\x07": 0.5})
        view.say("[red]\x1b[2J")
    assert "[/bold]" in out.getvalue() and "a [/] b\\x1b]0;x\\x07 0.5" in out.getvalue()
    assert "[red]\\x1b[2J" in out.getvalue()
    assert "\x1b]" not in out.getvalue() and "\x1b[2J" not in out.getvalue()
    lines = io.StringIO()
    PlainLines(lines).say("\x1b[2J")
    assert lines.getvalue() == "\\x1b[2J\n"
