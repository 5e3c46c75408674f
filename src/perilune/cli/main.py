"""The entry point of the command line: finds the command, runs it and reports failures.

The module of a command is imported only when the command is invoked, so that `perilune --help` stays fast.
A command raises `PeriluneError`. This module turns any exception into one message and an exit code: 0 done,
1 the work failed, 2 the request was wrong, 130 Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from perilune import __version__
from perilune.cli.commands import (
    COMMANDS,
    PANELS,
    PROGRAM_NAME,
    program_command,
    use_program_command,
)
from perilune.cli.failures import flush_stdout, report_failure
from perilune.cli.groups import CommandGroup
from perilune.errors import UserInterruptError
from perilune.garbage import reduce_garbage_collection
from perilune.redaction import redact_output

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class LazyGroup(CommandGroup):
    """A group that knows its commands by name and imports a command when it is invoked."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a placeholder with name and help line; `resolve_command` loads the real command."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1], callback=lambda: None)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one list of commands for each panel."""
        width = max(map(len, COMMANDS))
        for panel, commands in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl([(f"{name:{width}}", line) for name, (_, line) in commands.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the command that `args` start with.

        Raises:
            RequestError: when there is no such command.
        """
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(name), rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Ctrl-C is reported like every other failure."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise UserInterruptError("interrupted") from None
        except typer.BadParameter as error:
            error.message = _state_value(error)
            raise


def _state_value(error: typer.BadParameter) -> str:
    """Return the message of a wrong value, with the value instead of pydantic's "Input"."""
    problems = getattr(error.__cause__, "errors", None)
    if problems is None:
        return error.message
    problem = problems(include_url=False)[0]
    text: str = problem["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    return text.replace("Input", repr(problem["input"]), 1)


def load_command(name: str) -> Any:
    """Import the command called `name` as an object that the parser can invoke."""
    target, help_line = COMMANDS[name]
    module, _, attribute = target.partition(":")
    loaded = getattr(import_module(f"perilune.cli.{module}"), attribute)
    if isinstance(loaded, typer.Typer):
        loaded.rich_markup_mode = None
        command: Any = typer.main.get_group(loaded)
        command.name, command.help = name, command.help or help_line
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name, context_settings=HELP_OPTIONS)(loaded)
        command = typer.main.get_command(single)
    for item in (command, *getattr(command, "commands", {}).values()):
        item.help, item.epilog = use_program_command(item.help or ""), use_program_command(item.epilog or "")
        paragraph = " ".join(item.help.partition("\n\n")[0].split())
        sentence = paragraph.partition(". ")[0].removesuffix(".")  # whole, although the parser would cut it
        item.short_help = f"{sentence}."
    return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=HELP_OPTIONS,
    help="Post-training of language models from one recipe, on this machine or a rented one.",
    epilog="State is in $PERILUNE_HOME (default ~/.perilune). Exit codes: 0 done, 1 the work failed, "
    "2 the request was wrong, 130 Ctrl-C.",
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"{PROGRAM_NAME} {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of failures.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept the options that every command shares. `main` has already removed --debug."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the command's exit code."""
    _replace_closed_streams()
    reduce_garbage_collection()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    # People add --debug at the end of the line that failed, so it may stand anywhere.
    words = [argument for argument in words if argument != "--debug"]
    as_json = "--json" in words
    with redact_output():
        try:
            command = typer.main.get_command(app)
            code = command.main(words, prog_name=program_command(), standalone_mode=not as_json)
        except SystemExit as leaving:
            sys.exit(leaving.code or flush_stdout())
        except BaseException as error:
            sys.exit(report_failure(error, debug=debug, as_json=as_json))
        sys.exit(code or flush_stdout())


def _replace_closed_streams() -> None:
    """Open /dev/null in place of standard streams that the parent has closed, as `>&-` does in a shell."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115  # it stays open


if __name__ == "__main__":
    main()
