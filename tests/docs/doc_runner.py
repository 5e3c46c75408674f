"""Runs the code and commands of a page's blocks in the page's folder, and checks its recipes."""

import ast
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import yaml
from doc_blocks import Block

from perilune.cli.main import load_command
from perilune.control.machines.providers import PROVIDERS_FILE, Providers
from perilune.control.record.home import Home
from perilune.control.runs.templates import load_template
from perilune.errors import RequestError
from perilune.recipe.load import bundled_recipe, load_recipe

# Overrides that make the stages of a documented recipe small enough for a test. Forgetting would take most of
# the time of a pretrained model.
SMALL = {
    "collect": {"traces": 200},
    "sft": {"steps": 2, "batch_size": 8, "forgetting": False},
    "rl": {"steps": 2, "prompts": 2, "forgetting": False},
    "evaluate": {"tasks": 4},
    "preference": {"steps": 2, "batch_size": 4},
    "connect_four": {"steps": 2, "learning.games": 32},
    "connect_four_judge": {"positions": 2, "first_ply": 26, "games": 4, "simulations": [0, 4]},
}
RUNS_A_RECIPE = re.compile(r"^perilune (quickstart|run|sweep)\b[^|>&#]*")
SHELL = {"|", "||", "<", ">", ">>", "&", "&&", ";", "2>"}  # tokens that end a command
SEEDS = re.compile(r"--seeds \S+")
TWO_VALUES = re.compile(r"^([\w.]+=[^,\[{]+,[^,]+),.*")  # of an axis with more values


def smaller(value: Any, own: Any) -> Any:
    """The smaller of two integers; `value` if the page has no integer."""
    return min(value, own) if isinstance(own, int) else value


class Runner:
    """Runs the blocks of one page, in order; Python blocks share their names.

    With `runs` set to False, code is compiled, its names are looked up, and commands are parsed. Recipes are
    still loaded.
    """

    def __init__(self, folder: Path, environment: dict[str, str], seconds: float = 600) -> None:
        self.folder = folder
        self.seconds = seconds
        self.runs = True
        self.site = folder / "installed"  # the page's own package is installed here
        self.site.mkdir(parents=True)
        self.import_paths = (self.site, folder / "src", folder)
        paths = [*map(str, self.import_paths), environment.get("PYTHONPATH", "")]
        self.environment = environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.names: dict[str, Any] = {"__name__": "page"}

    def do(self, block: Block) -> None:
        """Run or check one block. Errors name the page and line of the block."""
        if block.title:
            self._write(block)
        try:
            getattr(self, f"_{block.language}")(block)
        except subprocess.CalledProcessError as error:
            raise AssertionError(
                f"{block.place}: exit code {error.returncode}\n{error.stdout}{error.stderr}"
            ) from None
        except RequestError as error:
            raise AssertionError(f"{block.place}: {error}") from None

    def _write(self, block: Block) -> None:
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
        importlib.invalidate_caches()  # the import system may have cached that the folder is absent

    def _python(self, block: Block) -> None:
        """A titled block is a module, which is only compiled. Other blocks run."""
        if block.title or not self.runs:
            compile(block.text, block.place, "exec")
            self._check_names(ast.parse(block.text))
            return
        source = "\n" * (block.line - 1) + block.text  # so that tracebacks name the line of the page
        exec(compile(source, str(block.page), "exec"), self.names)

    def _check_names(self, code: ast.Module) -> None:
        """Check that the names that the code imports from Perilune exist, and the attributes of classes."""
        for node in ast.walk(code):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "perilune":
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
                    self.names[alias.asname or alias.name] = getattr(module, alias.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = self.names.get(node.value.id)
                known = not isinstance(owner, type) or hasattr(owner, node.attr)
                assert known, f"{node.value.id} has no {node.attr}"

    def _bash(self, block: Block) -> None:
        self._shell(block.text)

    def _console(self, block: Block) -> None:
        """Lines after "$ " are commands, the rest is output. Without any "$ ", each line is only parsed."""
        commands = re.findall(r"^\$ (.*)$", block.text, re.MULTILINE)
        if commands:
            self._shell("\n".join(commands))
        for line in [] if commands else block.text.splitlines():
            parses(shlex.split(line, comments=True))

    def _shell(self, text: str) -> None:
        lines = text.replace("\\\n", " ").splitlines()
        if not self.runs:
            for line in lines:
                if line.startswith("perilune "):
                    parses(shlex.split(line, comments=True))
            return
        script = "\n".join(map(self.small, lines))
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.seconds,
            check=True,
        )

    def small(self, line: str) -> str:
        """The command with overrides for a small recipe; a sweep keeps two values per axis and one seed."""
        if not (command := RUNS_A_RECIPE.match(line)):
            return line
        words = [TWO_VALUES.sub(r"\1", word) for word in shlex.split(command[0])]
        named = Path("quickstart" if words[1] == "quickstart" else words[2])
        bundled = not (self.folder / named).exists()
        recipe = load_recipe(bundled_recipe(str(named)) if bundled else self.folder / named)
        changes = ["resources.threads=1"]
        for stage in recipe.stages:
            for key, value in SMALL.get(stage.task, {}).items():
                changes.append(f"{stage.name}.{key}={smaller(value, stage.spec.get(key))}")
        words += [part for change in changes for part in ("--set", change)]
        return SEEDS.sub("--seeds 1", f"{shlex.join(words)} {line[command.end() :]}")

    def _yaml(self, block: Block) -> None:
        """Load a recipe; sections without stages override the bundled quickstart. Templates and provider
        settings are written to the home and loaded."""
        document = yaml.safe_load(block.text)
        if "providers" in document:
            home = Home.open(Path(self.environment["PERILUNE_HOME"]))
            (home.root / PROVIDERS_FILE).write_text(block.text, encoding="utf-8")
            assert Providers(home).settings()
            return
        if "placement" in document:
            home = Home.open(Path(self.environment["PERILUNE_HOME"]))
            template = home.root / "templates" / Path(block.title or "checked.yaml").name
            template.parent.mkdir(exist_ok=True)
            template.write_text(block.text, encoding="utf-8")
            load_template(home, template.stem)
            return
        if "stages" not in document:
            base = yaml.safe_load(bundled_recipe("quickstart").read_text(encoding="utf-8"))
            document = base | document
        path = self.folder / "checked.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        load_recipe(path)

    def _json(self, block: Block) -> None:
        for line in [block.text] if block.text.startswith(("{\n", "[\n")) else block.text.splitlines():
            json.loads(line)

    def _toml(self, block: Block) -> None:
        """Install a titled pyproject.toml: register its entry points."""
        document = tomllib.loads(block.text)
        groups = document["project"].get("entry-points", {})
        if not block.title:
            return
        name = document["project"]["name"]
        info = self.site / f"{name.replace('-', '_')}-0.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.0\n")
        lines = []
        for group, points in groups.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        importlib.invalidate_caches()


def parses(words: list[str]) -> None:
    """Check that the command exists and accepts these options and arguments.

    Raises:
        click.UsageError: if it does not.
    """
    start = words.index("perilune") + 1  # skip variables and pipes before it
    name, *rest = itertools.takewhile(lambda word: word not in SHELL, words[start:])
    command = load_command(name)
    while commands := getattr(command, "commands", None):
        command, rest = commands[rest[0]], rest[1:]
    command.make_context(name, rest)
