"""`perilune push`: new weights for a running server."""

from dataclasses import asdict
from typing import Annotated

import typer

from perilune.cli.arguments import (
    CheckpointArgument,
    Json,
    ServerToken,
    find_checkpoint,
    read_token,
    require_packages,
)
from perilune.cli.output import echo, print_json
from perilune.units import format_size


def push(
    checkpoint: CheckpointArgument,
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server, with or without /v1.")],
    *,
    base: Annotated[
        str,
        typer.Option(
            metavar="CHECKPOINT",
            help="Send only the changes from this checkpoint; all weights if the server has other ones.",
        ),
    ] = "",
    token_env: ServerToken = "",
    as_json: Json = False,
) -> None:
    """Give a running server the weights of a checkpoint, without a restart.

    The server is `perilune serve --weight-updates`, on any machine. It answers requests during the transfer,
    and an interrupted transfer resumes. The weights are replaced between two tokens, all at once. Requests in
    flight continue with the new weights.

    The server may also be vLLM with VLLM_SERVER_DEV_MODE=1, or SGLang. Both must see the checkpoint under
    the same path. A folder with a PEFT adapter replaces vLLM's adapter of that name.

    \b
    perilune push rl http://127.0.0.1:8000
    perilune push ./step-20 https://gpu.example:8000 --base ./step-10 --token-env SERVER_TOKEN
    """
    require_packages("remote", "httpx")
    token = read_token(token_env)
    folder = find_checkpoint(checkpoint)
    before = find_checkpoint(base) if base else None
    from perilune.weights.push import find_server

    tenths = 0

    def report(sent: int, total: int) -> None:
        nonlocal tenths
        if total >= 1 << 24 and 10 * sent // total > tenths:  # a line for every tenth of a large file
            tenths = 10 * sent // total
            echo(f"sent {format_size(sent)} of {format_size(total)}", err=True)

    pushed = find_server(url, token).push(folder, before, report)
    if as_json:
        print_json(asdict(pushed))
        return
    version = "" if pushed.version is None else f" version {pushed.version} of"
    sent = f", {format_size(pushed.bytes)} sent" if pushed.bytes else ""
    echo(f"{pushed.server} at {url} has{version} the weights after {pushed.seconds:.1f} s{sent}")
