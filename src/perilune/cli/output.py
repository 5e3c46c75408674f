"""What commands print on stdout: text in which nothing commands the terminal, and JSON."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import Any

import typer

from perilune.terminal import printable


def echo(text: str, *, err: bool = False) -> None:
    """Print a line, or lines, that may hold what a model, a task or a file says."""
    typer.echo(printable(text), err=err)


def write(text: str) -> None:
    """As `echo`, for text that comes in pieces: nothing is added, and it is seen at once."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def wrapped(text: str, indent: int = 11) -> str:
    """A long line broken between words where stdout is a terminal, further lines indented; else as it is."""
    if not sys.stdout.isatty():
        return text
    width, hang = shutil.get_terminal_size().columns, " " * indent
    return textwrap.fill(text, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)


def as_markup(text: str) -> str:
    """Rich markup that shows `text` and nothing else."""
    from rich.markup import escape

    return escape(printable(text))


def print_json(document: Any) -> None:
    """Print one JSON document, in ASCII; what JSON has no form for is told as text."""
    typer.echo(json.dumps(document, indent=2, default=str))
