"""The table of commands, and the path that printed commands are shown with.

Each package under `perilune.cli` is one panel of `perilune --help`. An entry maps the name of a command to
"module:attribute" and its line of help. The attribute is a function that typer understands, or a
`typer.Typer` with subcommands.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

from perilune.cli import agents, data, inspect, machines, maintenance, start, train

Command = tuple[str, str]  # module and attribute, line of help

# The order of panels, and of commands in a panel, is the order of `perilune --help`.
PANELS: dict[str, dict[str, Command]] = {
    "Start": start.COMMANDS,
    "Train": train.COMMANDS,
    "Inspect": inspect.COMMANDS | agents.COMMANDS,
    "Data and environments": data.COMMANDS,
    "Machines": machines.COMMANDS,
    "Maintenance": maintenance.COMMANDS,
}
COMMANDS = {name: command for panel in PANELS.values() for name, command in panel.items()}

# Names that users try from habit, and the commands that do this here.
USUAL_NAMES = {
    "ls": "runs",
    "list": "runs",
    "ps": "runs",
    "status": "runs",
    "train": "run",
    "start": "run",
    "resume": "run",
    "plan": "run RECIPE --plan",
    "score": "eval",
    "test": "eval",
    "benchmark": "eval",
    "generate": "data generate",
    "stop": "cancel",
    "kill": "cancel",
    "delete": "rm",
    "remove": "rm",
    "clean": "gc",
    "du": "gc",
    "init": "new",
    "download": "model fetch",
    "convert": "model export",
    "merge": "model export",
    "tensorboard": "track",
}

PROGRAM_NAME = "perilune"
_COMMAND_PATTERN = re.compile(rf"(?<![\w./-]){PROGRAM_NAME}(?= (?:{'|'.join(COMMANDS)}|--help)\b)")


def program_command() -> str:
    """Return the command that starts this program from the user's shell.

    `perilune` if the shell finds this executable on PATH, else the path that it was called by, for example
    `.venv/bin/perilune` in an environment that is not active.
    """
    called = Path(sys.argv[0])
    if called.name != PROGRAM_NAME or not called.exists():
        return PROGRAM_NAME
    executable = shutil.which(PROGRAM_NAME)
    if executable is not None and Path(executable).samefile(called):
        return PROGRAM_NAME
    return shlex.quote(sys.argv[0])


def use_program_command(text: str) -> str:
    """Replace `perilune` in each command in `text` by `program_command()`, so that users can paste it."""
    name = program_command()
    return text if name == PROGRAM_NAME else _COMMAND_PATTERN.sub(lambda _: name, text)
