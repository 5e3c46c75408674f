"""Small panels of curves as SVG, legible on light and dark pages: one per arm, over the first arm in gray."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil

import numpy as np

COLUMNS = 3
WIDTH, HEIGHT = 250, 150  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 22, 24
INK, FIRST, OTHER = "#808080", "#808080", "#3f7fdf"

Curve = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""x, mean, lowest and highest, float64[points] each."""


def panels(
    curves: Mapping[str, Curve], x: str, y: str, told: str = "line: mean of seeds, band: least to most"
) -> str:
    """A panel for each curve after the first, which every panel shows in gray. y goes from 0 to 1."""
    (first, behind), *rest = curves.items()
    end = _round_up(max(float(curve[0][-1]) for curve in curves.values()))
    columns = min(COLUMNS, max(1, len(rest)))
    rows = ceil(len(rest) / columns)
    width, height = columns * WIDTH, rows * HEIGHT + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="10" fill="{INK}">'
    ]
    for number, (name, curve) in enumerate(rest):
        offset = (number % columns) * WIDTH, (number // columns) * HEIGHT
        parts += [
            f'<g transform="translate({offset[0]} {offset[1]})">',
            *_axes(f"{name} over {first}", end),
            *_drawn(behind, end, FIRST),
            *_drawn(curve, end, OTHER),
            "</g>",
        ]
    label = f"{y} against {x}; {told}; gray: {first}"
    parts.append(f'<text x="{width / 2:g}" y="{height - 8}" text-anchor="middle">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axes(title: str, end: float) -> list[str]:
    lines = [
        f'<text x="{LEFT}" y="14" font-size="12" font-weight="600" fill="{OTHER}">{escape(title)}</text>'
    ]
    for level in (0.0, 0.5, 1.0):
        y = _y(level)
        lines.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity=".3"/>')
        lines.append(f'<text x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{level:g}</text>')
    for level in (0.0, end / 2, end):
        lines.append(
            f'<text x="{_x(level, end):.1f}" y="{HEIGHT - BOTTOM + 13}" text-anchor="middle">{level:g}</text>'
        )
    return lines


def _drawn(curve: Curve, end: float, color: str) -> list[str]:
    x, mean, low, high = curve
    band = _points(x, high, end) + _points(x[::-1], low[::-1], end)
    return [
        f'<path d="M{"L".join(band)}Z" fill="{color}" fill-opacity=".18"/>',
        f'<path d="M{"L".join(_points(x, mean, end))}" fill="none" stroke="{color}" stroke-width="1.6"/>',
    ]


def _points(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, end: float) -> list[str]:
    return [f"{_x(float(a), end):.1f} {_y(float(b)):.1f}" for a, b in zip(x, y, strict=True)]


def _x(value: float, end: float) -> float:
    return LEFT + value / end * (WIDTH - LEFT - RIGHT)


def _y(value: float) -> float:
    return HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM)


def _round_up(value: float) -> float:
    """Round up to a simple number for the end of an axis."""
    step = 10.0 if value > 20 else 2.0 if value > 4 else 0.1
    return ceil(value / step) * step
