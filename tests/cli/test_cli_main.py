"""Help answers at once, every command can be loaded, and the reference page is what `--help` says."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from perilune import __version__
from perilune.cli import reference
from perilune.cli.main import COMMANDS, load_command

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "pyarrow", "sqlalchemy", "pydantic", "rich", "yaml", "reasoning_gym")


def test_help_lists_every_command_and_answers_at_once(perilune) -> None:
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = perilune("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # Seconds of a core, which do not depend on what else the machine is doing.
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert min(took) < 0.3


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from perilune.cli.main import main
try:
    main(["--help"])
except SystemExit as leaving:
    assert leaving.code == 0
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_loads_and_explains_itself(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert command.help


def test_the_reference_page_is_what_help_says() -> None:
    page = ROOT / "docs" / "reference" / "cli.md"
    assert page.read_text() == reference.markdown(), (
        "python -m perilune.cli.reference > docs/reference/cli.md"
    )


def test_version(perilune) -> None:
    assert perilune("--version").stdout == f"perilune {__version__}\n"


def test_an_unknown_command_is_answered_with_the_nearest(perilune) -> None:
    done = perilune("shwo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no command is called 'shwo'\n  try: perilune show\n"


def test_debug_may_stand_anywhere_and_shows_the_traceback(perilune) -> None:
    for arguments in (("--debug", "run", "none.yaml"), ("run", "none.yaml", "--debug")):
        done = perilune(*arguments)
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-2].startswith("error: none.yaml: no such recipe")
    assert "Traceback" not in perilune("run", "none.yaml").stderr
