"""Output of commands: text that cannot control the terminal, tables and JSON."""

import json
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

import typer

from perilune.cli.commands import use_program_command
from perilune.terminal import escape_control

NARROW_COLUMNS = 80  # width of a terminal below which each row of a table is printed as text
SLOW_SECONDS = 15.0  # before a command says what it waits for


def format_for_terminal(text: str) -> str:
    """Escape control characters in `text`, and show commands with the path of this program."""
    return use_program_command(escape_control(text))


def echo(text: str, *, err: bool = False) -> None:
    """Print one or more lines. They may contain text of a model, a task or a file."""
    typer.echo(format_for_terminal(text), err=err)


@contextmanager
def say_if_slow(message: str) -> Iterator[None]:
    """Print `message` on stderr if the block takes longer than `SLOW_SECONDS`."""
    timer = threading.Timer(SLOW_SECONDS, echo, (message,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def write(text: str) -> None:
    """Print a piece of the text of a model or a log, without a newline, and flush it."""
    sys.stdout.write(escape_control(text))
    sys.stdout.flush()


def wrap_text(text: str, indent: int = 11) -> str:
    """Wrap `text` to the width of the terminal with a hanging indent; unchanged without a terminal."""
    if not sys.stdout.isatty():
        return text
    width, hang = shutil.get_terminal_size().columns, " " * indent
    return textwrap.fill(text, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)


def interval_markup(mean: float, low: float, high: float) -> str:
    """Return rich markup for a share with its interval."""
    return f"{mean:.1%} [dim]({100 * low:.1f} to {100 * high:.1f})[/]"


def as_markup(text: str) -> str:
    """Return rich markup that shows `text` literally."""
    from rich.markup import escape

    return escape(format_for_terminal(text))


def reserve_stdout(context: typer.Context, as_json: bool) -> bool:
    """With `--json`, reserve stdout for the document. Other output, as of users' code, goes to stderr."""
    if as_json:
        context.with_resource(redirect_stdout(_ReservedStdout(sys.stdout, sys.stderr)))
    return as_json


class _ReservedStdout:
    """A stream in place of stdout that writes to stderr, except for `documents`."""

    def __init__(self, documents: TextIO, others: TextIO) -> None:
        self.documents, self._others = documents, others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


def print_json(document: Any, *, indent: int | None = 2) -> None:
    """Print one JSON document in ASCII. NaN and infinities become null; values of other types, texts."""
    try:
        text = json.dumps(document, indent=indent, default=str, allow_nan=False)
    except ValueError:
        known = json.loads(json.dumps(document, default=str), parse_constant=lambda name: None)
        text = json.dumps(known, indent=indent)
    typer.echo(text, file=getattr(sys.stdout, "documents", None))


def make_table(*columns: str, left: int = 1) -> Any:
    """Make a rich table with a rule below its head. The first `left` columns are text, the others figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(as_markup(name), justify="left" if index < left else "right", no_wrap=index >= left)
    return table


def make_console(width: int = 160) -> Any:
    """Make a rich console for tables on stdout, `width` columns wide where stdout is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)
