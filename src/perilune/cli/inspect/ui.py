"""`perilune ui`: the live page over the files of a home."""

from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import Json, require_packages
from perilune.cli.output import echo, print_json
from perilune.control.record.home import Home
from perilune.serve.settings import Host, Port, TokenEnv


def ui(
    home: Annotated[
        Path | None, typer.Option("--home", help="Home directory to show. Default: $PERILUNE_HOME.")
    ] = None,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    token_env: TokenEnv = "",
    as_json: Json = False,
) -> None:
    """Serve a page that shows experiments live: their health, curves and episodes, running or not.

    The page reads files and changes nothing: a run never waits for it. The command prints the URL.

    \b
    perilune ui
    perilune ui --port 0 --json
    """
    require_packages("serve", "fastapi", "uvicorn")
    from perilune.control.runs.experiments import Control
    from perilune.ui.live.server import serve_pages

    control = Control(Home.open(home))

    def announce(url: str) -> None:
        if as_json:
            print_json({"url": url, "home": str(control.home.root)})
        else:
            echo(f"{url} shows {control.home.root}; Ctrl-C ends it")

    serve_pages(control, host, port, token_env, announce)
