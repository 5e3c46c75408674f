"""Forgetting: the losses outside the trained task, as a table and as warnings, from a stage's summary."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from perilune.metrics.bootstrap import Interval

PERPLEXITY_RISE = 0.1  # rise of the perplexity above which training has damaged the model's English


class ForgettingRow(NamedTuple):
    """One measure as text; `change` is paired by passage or by task, with its 95% interval."""

    measure: str
    before: str
    after: str
    change: str


def forgetting_rows(found: Mapping[str, Any]) -> list[ForgettingRow]:
    """Return the figures of `summary["forgetting"]`, one row for each measure."""
    rows = []
    if text := found.get("text"):
        before, after = text["perplexity"]["before"], text["perplexity"]["after"]
        bits = text["bits_per_byte"]
        rows.append(
            ForgettingRow(
                "perplexity of English text", f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}"
            )
        )
        change = f"{Interval(**bits['change']):+.4f}"
        figures = (f"{bits['before']:.4f}", f"{bits['after']:.4f}", change)
        rows.append(ForgettingRow("bits per byte of English text", *figures))
    for entry in found.get("environments", ()):
        rates = {side: Interval(**bounds) for side, bounds in entry["pass@1"].items()}
        sides = (f"{rates['before']:.1%}", f"{rates['after']:.1%}", f"{rates['change']:+.1%}")
        rows.append(ForgettingRow(f"pass@1 of {entry['environment']}", *sides))
    if kl := found.get("kl"):
        rows.append(
            ForgettingRow("KL to the start, nats per answer", "0", f"{Interval(**kl['per_answer']):.3g}", "")
        )
        rows.append(ForgettingRow("KL to the start, nats per token", "0", f"{kl['per_token']:.3g}", ""))
    return rows


def forgetting_warnings(found: Mapping[str, Any], key: str) -> list[str]:
    """Describe clear losses: falls of pass@1, and a perplexity that rose by more than `PERPLEXITY_RISE`.

    Args:
        key: recipe key that keeps the model closer to its start, for the advice.
    """
    lines = []
    if text := found.get("text"):
        before, after = text["perplexity"]["before"], text["perplexity"]["after"]
        if after > (1 + PERPLEXITY_RISE) * before and text["bits_per_byte"]["change"]["low"] > 0:
            lines.append(
                f"the perplexity of English text rose by {after / before - 1:.0%}, from {before:.1f} to"
                f" {after:.1f}; lower lr, train fewer steps, or set {key}"
            )
    lines += [
        f"pass@1 of {entry['environment']} fell by {-100 * entry['pass@1']['change']['mean']:.1f} points"
        for entry in found.get("environments", ())
        if entry["pass@1"]["change"]["high"] < 0
    ]
    return lines
