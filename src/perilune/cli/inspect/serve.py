"""`perilune serve`: a checkpoint behind OpenAI's HTTP API."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from perilune.cli.arguments import CheckpointArgument, add_options, find_checkpoint, require_packages
from perilune.cli.output import echo
from perilune.serve.settings import Settings


@add_options(Settings)
def serve(checkpoint: CheckpointArgument, **options: Any) -> None:
    """Serve a checkpoint over OpenAI's HTTP API: /v1/chat/completions, /v1/completions, /v1/responses.

    Also serves /v1/models, /health, and /metrics for Prometheus. After SIGTERM or Ctrl-C the server finishes
    open requests and exits. A text-to-speech model in the format of Qwen3-TTS is served at /v1/audio/speech,
    with a player at /.

    \b
    perilune serve rl --name my-model
    perilune serve ./my-model --adapter math=./lora
    perilune serve ./my-model --backend openvino --device GPU
    perilune serve ./my-model --offload-memory 4 --offload-disk 20
    """
    require_packages("serve", "fastapi", "httptools", "prometheus_client", "uvicorn")
    folder = find_checkpoint(checkpoint)
    settings = Settings(folder, **options)
    settings = replace(
        settings,
        name=settings.name or (folder.name if Path(checkpoint).is_dir() else checkpoint),
        draft=str(find_checkpoint(settings.draft)) if settings.draft else "",
    )
    from perilune.serve.server import serve as run_server

    run_server(
        settings,
        lambda url: echo(f"{settings.name} answers at {url}", err=True),
        lambda notice: echo(notice, err=True),
    )
