"""Draws the final figures of a recipe's runs: a row for each setting, a dot for each seed."""

from collections.abc import Sequence
from html import escape

from perilune.metrics.across_seeds import t_interval
from perilune.wiki.facts import Figure, RunFacts
from perilune.wiki.pages import main_figure
from perilune.wiki.query import format_figure

WIDTH, ROW_HEIGHT, LEFT, RIGHT, TOP = 640, 26, 230, 24, 34
TEXT_COLOR, MARK_COLOR = "#808080", "#3f7fdf"
MAX_ROWS = 40


def plot_runs(runs: Sequence[RunFacts]) -> str:
    """Return an SVG of the last stage that has figures; "" without figures.

    Dots are seeds; a line is the 95% interval over at least two seeds.
    """
    known = [run for run in runs if not run.superseded and main_figure(run)]
    if not known:
        return ""
    last = known[-1]
    figure = main_figure(last) or ""
    rows: dict[str, dict[int, RunFacts]] = {}  # by setting and seed
    for run in known:
        if run.stage == last.stage and figure in run.figures:
            rows.setdefault(run.setting, {})[run.seed] = run
    values = [run.figures[figure].mean for seeds in rows.values() for run in seeds.values()]
    low, high = min(0.0, *values), max(values)
    high = 1.0 if low >= 0 and high <= 1 and format_figure(figure, Figure(1)).endswith("%") else high
    scale = (WIDTH - LEFT - RIGHT) / ((high - low) or 1.0)

    def x(value: float) -> str:
        return f"{LEFT + (min(max(value, low), high) - low) * scale:.1f}"

    height = TOP + ROW_HEIGHT * min(len(rows), MAX_ROWS) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="{TEXT_COLOR}">',
        f'<text x="{LEFT}" y="18">{escape(f"{last.stage}: {figure}")}</text>',
    ]
    for index, (setting, seeds) in enumerate(list(rows.items())[:MAX_ROWS]):
        group = list(seeds.values())
        name = ", ".join(group[-1].overrides) or f"setting {setting}"
        y, means = TOP + ROW_HEIGHT * index + 13, [run.figures[figure].mean for run in group]
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(name[:34])}</text>')
        if len(means) > 1:
            ends = t_interval(means)
            line = f'x1="{x(ends["low"])}" x2="{x(ends["high"])}" y1="{y}" y2="{y}"'
            parts.append(f'<line {line} stroke="{MARK_COLOR}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(dot)}" cy="{y}" r="4" fill="{MARK_COLOR}" fill-opacity="0.6"/>' for dot in means
        ]
    for value in (low, high):
        label = escape(format_figure(figure, Figure(value)))
        parts.append(f'<text x="{x(value)}" y="{height - 8}" text-anchor="middle">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])
