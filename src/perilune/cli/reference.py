"""Generate docs/reference/cli.md from the help of each command: `python -m perilune.cli.reference`."""

import inspect
from collections.abc import Iterator
from typing import Any

from perilune.cli.commands import PANELS
from perilune.cli.main import load_command


def render_markdown() -> str:
    """Return the reference page of the command line."""
    lines = [
        "# Command line",
        "",
        "Every listing has the option `--json`, which prints one JSON document on standard output. With",
        "`--json`, an error is the last line on standard error: a JSON object with the keys `error`,",
        "`where`, `remedy` and `exit_code`. Perilune keeps its state in `$PERILUNE_HOME` (default",
        "`~/.perilune`). The option `--debug`, anywhere on the command line, prints the traceback of an",
        "error.",
        "",
        "Exit codes: 0 after success, 1 if the work failed, 2 if the request was wrong, and 130 if Ctrl-C",
        "ended the command. `perilune wait` has further exit codes.",
        "",
        "<!-- Written by `python -m perilune.cli.reference`; a test keeps it in step. -->",
    ]
    for panel, commands in PANELS.items():
        lines += ["", f"## {panel}"]
        for name in commands:
            lines += _render_command(f"perilune {name}", load_command(name), level=3)
    return "\n".join(lines) + "\n"


def _render_command(path: str, command: Any, level: int) -> Iterator[str]:
    children = getattr(command, "commands", {})
    yield from ("", f"{'#' * level} {path}")
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        is_example = paragraph.startswith("\b")
        yield from ("", *(_console(*paragraph.splitlines()[1:]) if is_example else [paragraph]))
    if epilog := (command.epilog or "").removeprefix("Example: "):
        yield from ("", *_console(epilog))
    if children:
        for name, child in children.items():
            yield from _render_command(f"{path} {name}", child, level + 1)
        return
    rows = [row for parameter in command.params if (row := _render_option(parameter))]
    if rows:
        yield from ("", "| | |", "|---|---|", *rows)


def _console(*lines: str) -> list[str]:
    return ["```console", *lines, "```"]


def _render_option(parameter: Any) -> str:
    if parameter.name == "help" or getattr(parameter, "hidden", False):
        return ""
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
        names = ", ".join(parameter.opts) + value
    default = parameter.default
    has_default = (
        default not in (None, False, (), [], "") and not callable(default) and not parameter.required
    )
    return f"| `{names}` | {parameter.help or ''}{f' Default: `{default}`.' if has_default else ''} |"


if __name__ == "__main__":
    print(render_markdown(), end="")
