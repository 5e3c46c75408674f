"""`perilune mcp`: the tools for software agents."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import require_packages
from perilune.errors import RequestError


def mcp(
    actions: Annotated[
        bool, typer.Option("--actions", help="Also offer tools that plan, start and cancel runs.")
    ] = False,
    recipes: Annotated[
        Path, typer.Option("--recipes", metavar="DIR", help="Folder of the recipes that agents may run.")
    ] = Path(),
    skill: Annotated[
        bool, typer.Option("--skill", help="Print a skill for agents that have a shell, and exit.")
    ] = False,
) -> None:
    """Serve this home to software agents over MCP, on standard input and output.

    The tools read runs, curves, episodes and comparisons. With --actions, agents can also start and cancel
    runs. The first call returns a plan with its cost and a token. Only a second call with this token acts.

    \b
    perilune mcp
    perilune mcp --actions --recipes recipes
    perilune mcp --skill
    """
    if skill:
        typer.echo((files("perilune.cli.agents") / "SKILL.md").read_text(encoding="utf-8"), nl=False)
        return
    if actions and not recipes.is_dir():
        raise RequestError("no such folder", where=f"--recipes {recipes}")
    require_packages("agents", "mcp")
    from perilune.cli.agents.actions import Actor
    from perilune.cli.agents.reading import Reader
    from perilune.cli.agents.server import Tools, serve
    from perilune.control.runs.experiments import Control

    control = Control()
    serve(Tools(Reader(control), Actor(control, recipes) if actions else None))
