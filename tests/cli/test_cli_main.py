"""`--help` is fast, every command loads, and the reference page matches `--help`."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import SCRIPT, environment

from perilune import __version__
from perilune.cli import reference
from perilune.cli.commands import COMMANDS, PANELS, USUAL_NAMES, use_program_command
from perilune.cli.main import load_command

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "pyarrow", "sqlalchemy", "pydantic", "rich", "yaml", "reasoning_gym")


def test_help_lists_every_command_within_300_ms(perilune) -> None:
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = perilune("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # CPU seconds do not depend on the load of the machine.
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert min(took) < 0.3


def test_help_groups_commands_and_lists_rare_ones_last(perilune) -> None:
    lines = perilune("--help").stdout.splitlines()
    headings = [line.removesuffix(":") for line in lines if line.removesuffix(":") in PANELS]
    assert headings == [
        "Start", "Train", "Inspect", "Data and environments", "Machines", "Maintenance",
    ]  # fmt: skip
    assert list(COMMANDS)[-5:] == ["worker", "reconcile", "gc", "panic", "lab"]
    assert [line for line in lines[1:] if line.endswith("...")] == []  # no help line is truncated
    assert sum(map(len, PANELS.values())) == len(COMMANDS)  # no command is in two panels


def _leaves(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Commands without subcommands, each with the words that invoke it."""
    children = getattr(command, "commands", {})
    for name, child in children.items():
        yield from _leaves(f"{path} {name}", child)
    if not children:
        yield path, command


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_has_an_example(name: str) -> None:
    for path, command in _leaves(f"perilune {name}", load_command(name)):
        examples = command.help.partition("\b\n")[2] + (command.epilog or "")
        assert path in examples, path


def test_help_imports_no_heavy_packages() -> None:
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
def test_every_command_loads_and_has_help(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert command.help
    for path, leaf in _leaves(f"perilune {name}", command):
        assert leaf.short_help.endswith(".") and not leaf.short_help.endswith(".."), path


def test_cli_reference_page_is_current() -> None:
    page = ROOT / "docs" / "reference" / "cli.md"
    assert page.read_text() == reference.render_markdown(), (
        "python -m perilune.cli.reference > docs/reference/cli.md"
    )


def test_version(perilune) -> None:
    assert perilune("--version").stdout == f"perilune {__version__}\n"


def test_unknown_command_suggests_the_nearest(perilune) -> None:
    done = perilune("shwo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown command 'shwo'\n  try: perilune show\n"
    assert perilune("bogus").stderr == "error: unknown command 'bogus'\n  try: perilune --help\n"  # not logs
    assert perilune("ls").stderr == "error: unknown command 'ls'\n  try: perilune runs\n"


def test_unknown_subcommand_suggests_the_nearest_in_its_group(perilune) -> None:
    done = perilune("model", "lst")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: unknown command 'model lst'\n  try: perilune model list\n"
    assert perilune("data", "check").stderr.endswith("  try: perilune data --help\n")  # not a usual name
    assert perilune("model", "download").stderr.endswith("  try: perilune model fetch\n")


def test_usual_names_lead_to_commands() -> None:
    assert not USUAL_NAMES.keys() & COMMANDS.keys()
    assert {remedy.split()[0] for remedy in USUAL_NAMES.values()} <= COMMANDS.keys()


@pytest.mark.parametrize("active", [True, False], ids=["active", "not active"])
def test_printed_commands_work_as_printed(perilune, tmp_path: Path, active: bool) -> None:
    """If the virtual environment is not active, commands are printed with the path that the user typed."""
    script = Path(SCRIPT)
    (tmp_path / ".venv").symlink_to(script.parents[1])
    paths = [path for path in os.environ["PATH"].split(os.pathsep) if Path(path) != script.parent]
    env = environment(tmp_path / "home") | {"PATH": os.pathsep.join([str(script.parent)] * active + paths)}
    called = ".venv/bin/perilune"

    def run(command: str) -> tuple[str, str]:
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        return done.stdout, done.stderr

    program = "perilune" if active else called
    assert run(f"{called} shwo")[1] == f"error: unknown command 'shwo'\n  try: {program} show\n"
    assert run(f"{called} runs")[0] == f"no runs yet; try: {program} quickstart\n"
    assert f"\n  {program} runs --all\n" in run(f"{called} runs --help")[0]
    assert run(f"{called} --help")[0].startswith(f"Usage: {program} [OPTIONS]")
    # The suggested command runs in the same shell.
    remedy = run(f"{called} show nothing")[1].partition("try: ")[2].strip()
    assert run(remedy)[0] == f"no runs yet; try: {program} quickstart\n"
    # Other text stays unchanged.
    assert use_program_command("perilune is installed; see perilune.yaml and x/perilune runs") == (
        "perilune is installed; see perilune.yaml and x/perilune runs"
    )


def test_debug_works_in_any_position_and_shows_the_traceback(perilune) -> None:
    for arguments in (("--debug", "run", "none.yaml"), ("run", "none.yaml", "--debug")):
        done = perilune(*arguments)
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert done.stderr.splitlines()[-2].startswith("error: none.yaml: no such recipe")
    assert "Traceback" not in perilune("run", "none.yaml").stderr
