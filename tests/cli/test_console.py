"""Progress output on a terminal and in a log file."""

import io

import pytest

from perilune.cli.console import LiveBars, PlainLines, format_metric, format_metrics, make_stage_progress
from perilune.units import format_duration


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
def test_figure_formats_name_and_value(name: str, value: float, text: str) -> None:
    assert format_metric(name, value) == text


def test_figures_text_lists_important_figures_first() -> None:
    text = format_metrics({"length": 5.0, "tokens_per_second": 10.0, "pass_rate": 0.5, "reward": 0.5})
    assert text == "reward 0.5, pass rate 50.0%, 10 tokens/s, length 5"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (61, "1:01"), (3725, "1:02:05")]
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


class Clock:
    """A clock that tests advance."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_plain_lines_print_figures_and_time_left_every_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("perilune.cli.console.time", clock)
    out = io.StringIO()
    with PlainLines(out, interval=5.0) as view:
        view.start("rl", "stage 1 of 2")
        for done in range(1, 13):
            clock.now += 1.0
            view.update("rl", done, 60, "steps", {"reward": 0.5})
        view.end("rl", "done", "0:12")
    assert out.getvalue().splitlines() == [
        "[rl] started, stage 1 of 2",
        "[rl] 5/60 steps, reward 0.5, 0:55 left",
        "[rl] 10/60 steps, reward 0.5, 0:50 left",
        "[rl] done, 0:12",
    ]


def test_time_left_ignores_progress_made_before_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work done before this command started does not count towards the speed."""
    clock = Clock()
    monkeypatch.setattr("perilune.cli.console.time", clock)
    out = io.StringIO()
    view = PlainLines(out, interval=0.0)
    view.update("rl", 50, 60, "steps", {})
    clock.now += 2.0
    view.update("rl", 51, 60, "steps", {})
    assert out.getvalue().splitlines()[-1] == "[rl] 51/60 steps, 0:18 left"


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def test_stage_progress_uses_bars_on_terminals_and_lines_elsewhere() -> None:
    assert isinstance(make_stage_progress(Terminal()), LiveBars)
    assert isinstance(make_stage_progress(io.StringIO()), PlainLines)


def test_live_bars_show_each_stage_once_with_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with LiveBars(out) as view:
        view.end("traces", "reused", "finished before")
        view.start("rl", "stage 2 of 2")
        view.update("rl", 30, 60, "steps", {"reward": 0.5})
        view.print("[rl] attempt 2 takes over")
        view.end("rl", "failed", "out_of_memory")
    last = out.getvalue().rpartition("takes over")[2]
    assert "attempt 2 takes over" in out.getvalue()
    assert "finished before" in last
    assert "30/60 steps" in last
    assert "out_of_memory" in last
    assert "✗" in last


def test_progress_escapes_markup_and_terminal_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with LiveBars(out) as view:
        view.start("rl", "")
        view.update("rl", 1, 2, "[/bold]", {"a [/] b\x1b]0;x\x07": 0.5})
        view.print("[red]\x1b[2J")
        view.start("rl.languages=[en] [/x]", "")  # a label of a sweep
        view.update("rl.languages=[en] [/x]", 1, 2, "\x1b[2Jsteps", {})
        view.end("rl.languages=[en] [/x]", "failed", "\x1b[2Jwhy")  # the message of a task
    assert "rl.languages=[en] [/x]" in out.getvalue() and "\\x1b[2Jwhy" in out.getvalue()
    assert "[/bold]" in out.getvalue() and "a [/] b\\x1b]0;x\\x07 0.5" in out.getvalue()
    assert "[red]\\x1b[2J" in out.getvalue()
    assert "\x1b]" not in out.getvalue() and "\x1b[2J" not in out.getvalue()
    lines = io.StringIO()
    PlainLines(lines).print("\x1b[2J")
    assert lines.getvalue() == "\\x1b[2J\n"
