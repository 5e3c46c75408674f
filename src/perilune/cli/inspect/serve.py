"""`perilune serve`: a checkpoint behind OpenAI's HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from perilune.cli.arguments import CheckpointArgument, checkpoint_folder, require_packages
from perilune.cli.output import echo
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.engine.openvino_runner import OpenVino


Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")]
TokenEnv = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Environment variable with the bearer token of requests. Required unless HOST is loopback.",
    ),
]
Name = Annotated[
    str, typer.Option(help="Model name in requests. Default: the name of the folder or the run.")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="A LoRA adapter as PEFT writes it; requests select it with model=NAME. Repeatable.",
    ),
]
AdaptersFrom = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Let clients load and unload the LoRA adapters in this folder."),
]
Control = Annotated[
    bool,
    typer.Option(
        "--control",
        help="Let clients pause the server, put the model to sleep and empty the prefix cache, as in vLLM.",
    ),
]
Slots = Annotated[int, typer.Option(min=1, max=4096, help="Samples that are computed at a time.")]
MaxQueue = Annotated[int, typer.Option(min=0, help="Samples that may wait; further requests get status 429.")]
CacheTokens = Annotated[
    int,
    typer.Option(
        min=0,
        max=1 << 30,
        help="Tokens in the KV cache, which bounds the length of a request. 0 for as many as fit into 4 GiB.",
    ),
]
OffloadMemory = Annotated[
    float,
    typer.Option(
        min=0, metavar="GIB", help="Host memory for the keys and values that the cache evicts, in GiB."
    ),
]
OffloadDisk = Annotated[
    float,
    typer.Option(
        min=0, metavar="GIB", help="Size of a temporary file for what does not fit into host memory, in GiB."
    ),
]
Speculate = Annotated[
    Literal["auto", "off", "lookup", "draft"],
    typer.Option(
        help="Speculative decoding, which does not change answers: propose tokens from earlier text (lookup)"
        " or with a draft model (draft). auto: lookup on a CPU."
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        metavar="CHECKPOINT",
        help="Draft model for --speculate draft. Default: the served model in int8.",
    ),
]
MaxBody = Annotated[float, typer.Option(min=0.001, max=1024, help="Largest request body, in MiB.")]
Device = Annotated[
    str,
    typer.Option(
        help="Device of the model: auto, cpu or cuda; with --backend openvino auto, CPU, GPU, NPU, or another"
        " that `perilune doctor` lists."
    ),
]
Backend = Annotated[
    Literal["native", "openvino"],
    typer.Option(help="Compute the model with Perilune's engine, or with OpenVINO on Intel devices."),
]
Weights = Annotated[
    Literal["float32", "int8"], typer.Option(help="How OpenVINO stores matrices; needs --backend openvino.")
]
KvCache = Annotated[
    Literal["float32", "u8"],
    typer.Option(help="How OpenVINO stores keys and values; needs --backend openvino."),
]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Dtype of the weights.")]
Drain = Annotated[float, typer.Option(min=0, help="Seconds to finish open requests after SIGTERM or Ctrl-C.")]
Stall = Annotated[
    float, typer.Option(min=1, help="Seconds until a client that neither reads nor sends is disconnected.")
]
MaxConnections = Annotated[
    int | None,
    typer.Option(min=1, help="Open connections. Default: what the limit on open files allows, at most 4096."),
]

Reasoning = Annotated[
    bool,
    typer.Option("--reasoning", help="Return the text in <think> ... </think> as reasoning_content."),
]
Embeddings = Annotated[
    Literal["off", "mean", "last"],
    typer.Option(help="Serve /v1/embeddings: the mean hidden state of a text, or the one of its last token."),
]
Traces = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Append an OpenTelemetry span of each request, as JSON lines (OTLP)."),
]
ToolFormat = Annotated[
    Literal["auto", "hermes", "mistral", "llama3_json", "pythonic"],
    typer.Option(help="How the model writes tool calls. auto finds it in the chat template."),
]
WeightUpdates = Annotated[
    bool,
    typer.Option("--weight-updates", help="Let clients replace the weights, with `perilune push`."),
]


def serve(
    checkpoint: CheckpointArgument,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_env: TokenEnv = "",
    name: Name = "",
    adapter: Adapters = None,
    adapters_from: AdaptersFrom = None,
    slots: Slots = 64,
    max_queue: MaxQueue = 256,
    cache_tokens: CacheTokens = 0,
    offload_memory: OffloadMemory = 0.0,
    offload_disk: OffloadDisk = 0.0,
    speculate: Speculate = "auto",
    draft: Draft = "",
    max_body: MaxBody = 4.0,
    backend: Backend = "native",
    device: Device = "auto",
    weights: Weights = "float32",
    kv_cache: KvCache = "float32",
    dtype: Dtype = "float32",
    drain: Drain = 30.0,
    stall: Stall = 60.0,
    max_connections: MaxConnections = None,
    weight_updates: WeightUpdates = False,
    control: Control = False,
    reasoning: Reasoning = False,
    tool_format: ToolFormat = "auto",
    embeddings: Embeddings = "off",
    traces: Traces = None,
) -> None:
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
    folder = checkpoint_folder(checkpoint)
    from perilune.engine.offload import OffloadSettings
    from perilune.serve.server import Settings
    from perilune.serve.server import serve as run_server

    settings = Settings(
        checkpoint=folder,
        name=name or (folder.name if Path(checkpoint).is_dir() else checkpoint),
        host=host,
        port=port,
        token_env=token_env,
        slots=slots,
        max_queue=max_queue,
        cache_tokens=cache_tokens,
        offload=OffloadSettings(round(offload_memory * 2**30), round(offload_disk * 2**30))
        if offload_memory or offload_disk
        else None,
        speculate=None if speculate == "off" else speculate,
        draft=checkpoint_folder(draft) if draft else None,
        max_body=round(max_body * 2**20),
        device="cpu" if backend == "openvino" else _torch_device(device),
        dtype=dtype,
        drain=drain,
        stalled=stall,
        max_connections=max_connections,
        weight_updates=weight_updates,
        control=control,
        adapters_from=adapters_from,
        reasoning=reasoning,
        traces=traces,
        embeddings=None if embeddings == "off" else embeddings,
        tool_format=None if tool_format == "auto" else tool_format,
        adapters=dict(map(_adapter, adapter or [])),
        openvino=_openvino(backend, device, weights, kv_cache, dtype),
    )
    run_server(
        settings,
        lambda url: echo(f"{settings.name} answers at {url}", err=True),
        lambda notice: echo(notice, err=True),
    )


def _torch_device(given: str) -> str:
    if given not in {"auto", "cpu", "cuda"}:
        raise RequestError(
            f"{given!r} is not auto, cpu or cuda", where="--device", remedy="or add --backend openvino"
        )
    return given


def _openvino(
    backend: str,
    device: str,
    weights: Literal["float32", "int8"],
    cache: Literal["float32", "u8"],
    dtype: Literal["float32", "bfloat16"],
) -> OpenVino | None:
    """The settings of the backend, if it is OpenVINO."""
    if backend == "openvino":
        from perilune.engine.openvino_runner import OpenVino

        return OpenVino(device.upper(), weights, cache, precision=dtype)
    for option, value in {"--weights": weights, "--kv-cache": cache}.items():
        if value != "float32":
            raise RequestError(f"{value} needs --backend openvino", where=option)
    return None


def _adapter(given: str) -> tuple[str, Path]:
    """Name and folder."""
    name, _, folder = given.partition("=")
    if not name or not folder:
        raise RequestError(f"{given!r} is not NAME=FOLDER", where="--adapter")
    return name, Path(folder).expanduser()
