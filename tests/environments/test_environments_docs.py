"""The Python blocks and commands of the page on environments run unchanged."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from perilune.cli.data.environments import app

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "environments.md"


def test_python_blocks_of_environments_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})


def test_commands_of_environments_page_run():
    commands = re.findall(r"^\$ perilune environments (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
        assert result.exit_code == 0 and result.output
