"""A plot of the KV cache: bytes per token over the sequence length, both on logarithmic scales."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from perilune.units import format_size, format_tokens


def curve_svg(curve: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return the plot as an SVG of 640 x 360 that takes its colors from the page around it."""
    left, top, right, bottom = 80, 40, 620, 310
    points = [(math.log2(point["tokens"]), math.log2(point["cache_bytes_per_token"])) for point in curve]
    low, high = _bounds([y for _, y in points])
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)

    def x(value: float) -> float:
        return round(left + (value - first) / (last - first) * (right - left), 1)

    def y(value: float) -> float:
        return round(bottom - (value - low) / (high - low) * (bottom - top), 1)

    marks = [
        f'<text x="{x(power)}" y="{bottom + 20}" text-anchor="middle">{format_tokens(2**power)}</text>'
        for power in range(math.ceil(first), math.floor(last) + 1, 2)
    ]
    marks += [
        f'<path d="M{left} {y(power)}H{right}" stroke="currentColor" stroke-opacity="0.15"/>'
        f'<text x="{left - 8}" y="{y(power) + 4}" text-anchor="end">{format_size(2**power)}</text>'
        for power in range(math.ceil(low), math.floor(high) + 1)
    ]
    line = " ".join(f"{x(a)},{y(b)}" for a, b in points)
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif"'
        ' font-size="12" fill="currentColor">',
        f'<text x="{left}" y="22" font-size="14">{escape(title)}</text>',
        f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="currentColor"/>',
        *marks,
        f'<text x="{right}" y="{bottom + 40}" text-anchor="end">sequence length in tokens</text>',
        f'<polyline points="{line}" fill="none" stroke="#4f6bed" stroke-width="2"/>',
        "</svg>",
        "",
    ]
    return "\n".join(lines)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return a range of whole numbers that contains all values and is not empty."""
    low, high = math.floor(min(values)), math.ceil(max(values))
    return low, max(high, low + 1)
