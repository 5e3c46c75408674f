"""What the summary of a stage says about its training, in words."""

from collections.abc import Mapping
from typing import Any

MAIN = ("loss", "accuracy", "reward")  # the figures of a sentence
SHARES = ("accuracy", "pass_rate")


def training_figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """Each figure from the first steps to the last, then those of the held-out pairs."""
    steps = {name: f"{value} (first to last steps)" for name, value in _changes(summary).items()}
    return steps | {f"held-out {name}": value for name, value in _held_out(summary).items()}


def training_sentence(summary: Mapping[str, Any]) -> str:
    """The main figures of `training_figures`; empty for a stage without them."""
    said, held = _main(_changes(summary)), _main(_held_out(summary))
    said += " (first to last steps)" if said else ""
    count = summary.get("validation_pairs", 0)
    return f"{said}; on {count:,} held-out pair{'' if count == 1 else 's'} {held}" if held else said


def _main(figures: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {figures[name]}" for name in MAIN if name in figures)


def _changes(summary: Mapping[str, Any]) -> dict[str, str]:
    """Each figure's mean over the first steps and over the last."""
    first, last = summary.get("first") or {}, summary.get("last") or {}
    return {name: f"{_shown(name, first[name])} to {_shown(name, last[name])}" for name in first}


def _held_out(summary: Mapping[str, Any]) -> dict[str, str]:
    held = summary.get("validation") or {}
    names = {name: name.removeprefix("validation_") for name in held}
    return {names[name]: _shown(names[name], value) for name, value in held.items()}


def _shown(name: str, value: Any) -> str:
    """A figure as a percentage or a number, with its interval if it has one."""
    if isinstance(value, Mapping):
        return (
            f"{_shown(name, value['mean'])} ({_shown(name, value['low'])} to {_shown(name, value['high'])})"
        )
    return f"{value:.1%}" if name in SHARES else f"{value:,.4g}"
