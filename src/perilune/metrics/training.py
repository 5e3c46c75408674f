"""Describes the training of a stage in words, from its summary."""

from collections.abc import Mapping
from typing import Any

from perilune.plural import plural

SENTENCE_FIGURES = ("loss", "accuracy", "reward")  # the figures that `describe_training` names
SHARE_FIGURES = ("accuracy", "pass_rate")
STEP_PARTS = ("sampling", "scoring", "learning", "other")  # of a training step, in seconds in timings.jsonl


def training_figures(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return each figure from the first steps to the last, then those of the held-out pairs."""
    steps = {name: f"{value} (first to last steps)" for name, value in _describe_changes(summary).items()}
    return steps | {f"held-out {name}": value for name, value in _describe_held_out(summary).items()}


def describe_training(summary: Mapping[str, Any]) -> str:
    """Return the main figures of `training_figures`; empty for a stage without them."""
    main = _list_main_figures(_describe_changes(summary))
    main += " (first to last steps)" if main else ""
    held_out = _list_main_figures(_describe_held_out(summary))
    pairs = plural(summary.get("validation_pairs", 0), "held-out pair")
    return f"{main}; on {pairs} {held_out}" if held_out else main


def _list_main_figures(figures: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {figures[name]}" for name in SENTENCE_FIGURES if name in figures)


def _describe_changes(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return each figure's mean over the first steps and over the last."""
    first, last = summary.get("first") or {}, summary.get("last") or {}
    return {
        name: f"{_format_figure(name, first[name])} to {_format_figure(name, last[name])}" for name in first
    }


def _describe_held_out(summary: Mapping[str, Any]) -> dict[str, str]:
    figures = summary.get("validation") or {}
    names = {name: name.removeprefix("validation_") for name in figures}
    return {names[name]: _format_figure(names[name], value) for name, value in figures.items()}


def _format_figure(name: str, value: Any) -> str:
    """Return a figure as a percentage or a number, with its interval if it has one."""
    if isinstance(value, Mapping):
        mean, low, high = (_format_figure(name, value[key]) for key in ("mean", "low", "high"))
        return f"{mean} ({low} to {high})"
    return f"{value:.1%}" if name in SHARE_FIGURES else f"{value:,.4g}"
