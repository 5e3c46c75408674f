"""Commands about secrets: where each is kept. They show, and write down, no value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import Json, command_group
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

app = command_group("Say where secrets are kept. Recipes name them; no value is ever shown or written down.")
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="As a recipe names it: JUDGE_KEY.")]


@app.command("list", epilog="Example: perilune secrets list")
def list_secrets(as_json: Json = False) -> None:
    """Say which secrets have a place, and whether a value is there."""
    from perilune.bundle.secret_sources import read_sources, secret_value, sources_file

    found = []
    for name, source in sorted(read_sources().items()):
        try:
            problem = "" if secret_value(name) else "nothing is there"
        except RequestError as error:
            problem = error.what
        found.append({"name": name, "kept_in": str(source), "set": not problem, "problem": problem})
    if as_json:
        print_json({"file": str(sources_file()), "secrets": found})
    elif not found:
        echo("no secret has a place; without one it is an environment variable")
    for one in found if not as_json else ():
        echo(f"{one['name']}  {one['kept_in']}  {one['problem'] or 'set'}")


@app.command(
    "set",
    epilog="Example: perilune secrets set HF_TOKEN --file ~/.cache/huggingface/token",
)
def set_secret(
    name: NameArgument,
    *,
    keyring: Annotated[
        bool,
        typer.Option("--keyring", help="The system's keyring; asks for the value, or reads it from stdin."),
    ] = False,
    service: Annotated[str, typer.Option(help="Service in the keyring.")] = "perilune",
    file: Annotated[Path | None, typer.Option(help="A file that holds nothing else.")] = None,
    environment: Annotated[str | None, typer.Option(help="Another environment variable.")] = None,
) -> None:
    """Say where the value of a secret is kept."""
    from pydantic import ValidationError

    from perilune.bundle.secret_sources import SecretSource, keep_in_keyring, read_sources, write_sources

    sources = read_sources()
    try:
        source = SecretSource(
            keyring=service if keyring else None,
            file=None if file is None else str(file.expanduser().absolute()),
            environment=environment,
        )
    except ValidationError:
        raise RequestError("say one place: --keyring, --file or --environment", where=name) from None
    if not name.isidentifier() or not name.isascii():
        raise RequestError(f"'{name}' is no name of a variable", remedy="letters, digits and _")
    if keyring:
        keep_in_keyring(service, name, _asked(name))
    write_sources({**sources, name: source})
    echo(f"{name}: {source}")


@app.command(epilog="Example: perilune secrets forget JUDGE_KEY")
def forget(name: NameArgument) -> None:
    """Forget where a secret is kept. The value stays where it is."""
    from perilune.bundle.secret_sources import read_sources, write_sources

    sources = read_sources()
    if name not in sources:
        raise RequestError(f"no place is known of '{name}'", remedy="perilune secrets list")
    write_sources({other: source for other, source in sources.items() if other != name})


def _asked(name: str) -> str:
    import sys

    value = (
        str(typer.prompt(name, hide_input=True)) if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    )
    if not value:
        raise RequestError(f"no value was given for {name}", remedy="type it, or send it on stdin")
    return value
