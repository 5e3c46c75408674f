"""The settings of the server, which are the options of `perilune serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from perilune.errors import RequestError
from perilune.serve.tool_format_names import ToolFormatName

Host = Annotated[str, Option(help="Address to listen on.")]
Port = Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")]
TokenEnv = Annotated[
    str,
    Option(
        metavar="NAME",
        help="Environment variable with the bearer token that requests must send. Required unless --host "
        "is a loopback address.",
    ),
]


@dataclass(frozen=True)
class Settings:
    """Settings of the server. Each is an option of `perilune serve`, except for `checkpoint`, its argument.

    Raises:
        RequestError: when settings contradict each other, naming the option.
    """

    checkpoint: Path
    host: Host = "127.0.0.1"
    port: Port = 8000
    token_env: TokenEnv = ""
    name: Annotated[
        str, Option(help="Model name in requests. Default: the name of the folder or the run.")
    ] = ""
    adapters: Annotated[
        list[str] | None,
        Option(
            "--adapter",
            metavar="NAME=FOLDER",
            help="A LoRA adapter in PEFT's format, which requests select with model=NAME. Repeatable.",
        ),
    ] = None
    adapters_from: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="Let clients load and unload the LoRA adapters in this folder."),
    ] = None
    slots: Annotated[
        int, Option(min=1, max=4096, help="Maximum number of samples that are computed at a time.")
    ] = 64
    max_queue: Annotated[
        int, Option(min=0, help="Maximum number of waiting samples; further requests get status 429.")
    ] = 256
    cache_tokens: Annotated[
        int,
        Option(
            min=0,
            max=1 << 30,
            help="Size of the KV cache in tokens, which limits the length of a request. 0: enough for --slots"
            " samples of the full context, but at most 4 GiB in float32.",
        ),
    ] = 0
    offload_memory: Annotated[
        float,
        Option(
            min=0, metavar="GIB", help="Host memory for the keys and values that the cache evicts, in GiB."
        ),
    ] = 0.0
    offload_disk: Annotated[
        float,
        Option(
            min=0,
            metavar="GIB",
            help="Size of a temporary file for keys and values that do not fit into host memory, in GiB.",
        ),
    ] = 0.0
    speculate: Annotated[
        Literal["auto", "off", "lookup", "draft"],
        Option(
            help="Speculative decoding, which does not change answers: propose tokens from earlier text"
            " (lookup) or with a draft model (draft). auto: lookup on a CPU."
        ),
    ] = "auto"
    draft: Annotated[
        str,
        Option(
            metavar="CHECKPOINT",
            help="Draft model for --speculate draft. Default: the served model in int8.",
        ),
    ] = ""
    max_body: Annotated[
        float, Option(min=0.001, max=1024, help="Maximum size of a request body, in MiB.")
    ] = 4.0
    backend: Annotated[
        Literal["native", "openvino"],
        Option(help="Compute the model with Perilune's engine (native), or with OpenVINO on Intel devices."),
    ] = "native"
    device: Annotated[
        str,
        Option(
            help="Device of the model: auto, cpu or cuda. With --backend openvino: auto, CPU, GPU, NPU, or"
            " another device that `perilune doctor` lists."
        ),
    ] = "auto"
    weights: Annotated[
        Literal["float32", "int8"], Option(help="How OpenVINO stores matrices; needs --backend openvino.")
    ] = "float32"
    kv_cache: Annotated[
        Literal["float32", "u8"],
        Option(
            help="How OpenVINO stores keys and values; needs --backend openvino. float32: in the dtype of "
            "the weights."
        ),
    ] = "float32"
    dtype: Annotated[Literal["float32", "bfloat16"], Option(help="Dtype of the weights.")] = "float32"
    drain: Annotated[
        float,
        Option(
            min=0,
            help="Maximum seconds to finish open requests after SIGTERM or Ctrl-C. A second one aborts them.",
        ),
    ] = 30.0
    stall: Annotated[
        float,
        Option(min=1, help="Seconds after which a client that does not read its answer is disconnected."),
    ] = 60.0
    max_connections: Annotated[
        int | None,
        Option(
            min=1,
            help="Maximum number of open connections. Default: as many as the limit on open files allows, at"
            " most 4096.",
        ),
    ] = None
    weight_updates: Annotated[
        bool,
        Option("--weight-updates", help="Let clients replace the weights, with `perilune push`."),
    ] = False
    control: Annotated[
        bool,
        Option(
            "--control",
            help="Let clients pause the server, put the model to sleep and empty the prefix cache, as in"
            " vLLM.",
        ),
    ] = False
    reasoning: Annotated[
        bool,
        Option("--reasoning", help="Return the text in <think> ... </think> as reasoning_content."),
    ] = False
    tool_format: Annotated[
        Literal["auto", ToolFormatName],
        Option(help="Format of the model's tool calls. auto: read the format from the chat template."),
    ] = "auto"
    embeddings: Annotated[
        Literal["off", "mean", "last"],
        Option(
            help="Serve /v1/embeddings: a text's mean hidden state, or the hidden state of its last token."
        ),
    ] = "off"
    traces: Annotated[
        Path | None,
        Option(metavar="FILE", help="Append an OpenTelemetry span of each request, as JSON lines (OTLP)."),
    ] = None

    def __post_init__(self) -> None:
        if self.backend == "native":
            if self.device not in {"auto", "cpu", "cuda"}:
                what = f"{self.device!r} is not auto, cpu or cuda"
                raise RequestError(
                    what, where="--device", remedy="add --backend openvino if it is an OpenVINO device"
                )
            for option, value in {"--weights": self.weights, "--kv-cache": self.kv_cache}.items():
                if value != "float32":
                    raise RequestError(f"{value} needs --backend openvino", where=option)
        names = set()
        for adapter in self.adapters or []:
            name, _, folder = adapter.partition("=")
            if not name or not folder:
                raise RequestError(f"{adapter!r} is not NAME=FOLDER", where="--adapter")
            if name in names:
                raise RequestError(f"two adapters are named {name!r}", where="--adapter")
            names.add(name)

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The folders of LoRA adapters by their names in requests."""
        pairs = (adapter.partition("=") for adapter in self.adapters or [])
        return {name: Path(folder).expanduser() for name, _, folder in pairs}
