"""`perilune secrets`: configure where secrets are read from."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from perilune.bundle.secret_sources import (
    SecretSource,
    read_sources,
    secret_value,
    sources_file,
    store_in_keyring,
    write_sources,
)
from perilune.cli.arguments import Json, make_command_group
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

KEYRING_SERVICE = "perilune"

app = make_command_group(
    "Configure where secrets are read from. Perilune never prints a value or writes it to a file."
)
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the secret in recipes, such as JUDGE_KEY.")
]


@app.command("list", epilog="Example: perilune secrets list")
def list_secrets(as_json: Json = False) -> None:
    """List the configured secrets and whether each has a value."""
    rows = []
    for name, source in sorted(read_sources().items()):
        try:
            problem = "" if secret_value(name) else "no value"
        except RequestError as error:
            problem = error.what
        rows.append({"name": name, "kept_in": str(source), "set": not problem, "problem": problem})
    if as_json:
        print_json({"file": str(sources_file()), "secrets": rows})
    elif not rows:
        echo("no secrets are configured; a secret is then read from the environment variable of its name")
    for row in rows if not as_json else ():
        echo(f"{row['name']}  {row['kept_in']}  {row['problem'] or 'set'}")


@app.command("set", epilog="Example: perilune secrets set HF_TOKEN --file ~/.cache/huggingface/token")
def set_secret(
    name: NameArgument,
    *,
    keyring: Annotated[
        bool,
        typer.Option(
            "--keyring",
            help="Read from the system's keyring, and store the value there. The command asks for the value, "
            "or reads it from stdin.",
        ),
    ] = False,
    file: Annotated[Path | None, typer.Option(help="Read from a file that contains only the value.")] = None,
    environment: Annotated[str | None, typer.Option(help="Read from another environment variable.")] = None,
) -> None:
    """Set where the value of a secret is read from."""
    sources = read_sources()
    try:
        source = SecretSource(
            keyring=KEYRING_SERVICE if keyring else None,
            file=None if file is None else str(file.expanduser().absolute()),
            environment=environment,
        )
    except ValidationError:
        raise RequestError("give exactly one of --keyring, --file and --environment", where=name) from None
    if not name.isidentifier() or not name.isascii():
        raise RequestError(f"'{name}' is not a valid name", remedy="use letters, digits and _")
    if keyring:
        store_in_keyring(KEYRING_SERVICE, name, _prompt_value(name))
    write_sources({**sources, name: source})
    echo(f"{name}: {source}")


@app.command(epilog="Example: perilune secrets forget JUDGE_KEY")
def forget(name: NameArgument) -> None:
    """Forget where a secret is read from. The value itself is not deleted."""
    sources = read_sources()
    if name not in sources:
        raise RequestError(f"no secret '{name}' is configured", remedy="perilune secrets list")
    write_sources({other: source for other, source in sources.items() if other != name})


def _prompt_value(name: str) -> str:
    value = (
        str(typer.prompt(name, hide_input=True)) if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    )
    if not value:
        raise RequestError(f"no value for {name}", remedy="type it, or pass it on stdin")
    return value
