"""A group of commands that suggests the nearest command for an unknown one."""

import difflib
from typing import Any

from typer.core import TyperGroup

from perilune.cli.commands import USUAL_NAMES
from perilune.errors import RequestError


class CommandGroup(TyperGroup):
    """A group of commands: the program, or a command with subcommands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` start with.

        Raises:
            RequestError: when there is no such command. The remedy names the nearest, or --help.
        """
        name, names = args[0], self.list_commands(ctx)
        if name not in names:
            group = f"{ctx.info_name} " if ctx.parent else ""
            usual = USUAL_NAMES.get(name, "")
            close = [near for near in difflib.get_close_matches(name, names) if near[0] == name[0]]
            nearest = group + (close[0] if close else "--help")
            remedy = usual if usual.startswith(group) and usual else nearest
            raise RequestError(f"unknown command '{group}{name}'", remedy=f"perilune {remedy}")
        return super().resolve_command(ctx, args)
