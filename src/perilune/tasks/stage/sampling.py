"""Sampling settings, and the backend of a stage that may sample from a server."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from perilune.bundle.job import Job
from perilune.errors import RequestError
from perilune.frozen import Frozen
from perilune.learn.name_or_section import NameOrSection
from perilune.rollout.sub_agents import SubAgents
from perilune.servers import MAX_SERVER_TEMPERATURE, ServerToken, parse_server_url, require_httpx
from perilune.tasks.stage.defaults import ModelDefaults

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace
    from perilune.engine.backend import SamplingBackend
    from perilune.engine.openvino_runner import OpenVino
    from perilune.engine.remote import RemoteEngine
    from perilune.engine.request import SamplingParams
    from perilune.metrics.rounding import Rounding
    from perilune.models.text.tokenizer import Tokenizer


class SamplingSpec(ModelDefaults):
    """Fields of every stage that samples answers."""

    max_tokens: int = Field(
        64,
        ge=1,
        description="maximum tokens of an answer, or of each turn of an episode. Default for a pretrained"
        " model: 256, at most half of its positions",
    )
    temperature: float = Field(
        1.0, gt=0, description="sampling temperature; log-probs are those at this temperature"
    )

    def params(self, stop_token_ids: tuple[int, ...], *, greedy: bool = False) -> SamplingParams:
        """Return the engine's sampling parameters; `greedy` sets the temperature to 0."""
        from perilune.engine.request import SamplingParams

        return SamplingParams(self.max_tokens, 0.0 if greedy else self.temperature, stop_token_ids)


class RecordingSpec(SamplingSpec):
    """Fields of the stages that record the episodes they sample."""

    top_logprobs: int = Field(
        0,
        ge=0,
        le=20,
        description="number of most likely tokens to record at each position, for the report; 0: none",
    )

    def params(self, stop_token_ids: tuple[int, ...], *, greedy: bool = False) -> SamplingParams:
        return replace(super().params(stop_token_ids, greedy=greedy), top_logprobs=self.top_logprobs)


class ServerSpec(Frozen):
    """The fields of a stage's `engine` section: a server that samples."""

    name: Literal["server"] = Field("server", description="kind of engine; it may be omitted")
    url: str = Field(
        description="URL of an OpenAI-compatible server (vLLM, SGLang, perilune serve), with or without /v1"
    )
    model: str | None = Field(
        None, description="the model's name on the server; needed only if the server has several models"
    )
    token: ServerToken = None
    reported: Literal["raw", "tempered", "processed"] | None = Field(
        None,
        description="log-probs that the server reports: of the model, after temperature, or after all"
        " processing; by default inferred from the kind of server",
    )
    concurrency: int = Field(32, ge=1, le=1024, description="maximum concurrent requests")


class OpenVinoSpec(Frozen):
    """The fields of a stage's `engine` section for OpenVINO."""

    name: Literal["openvino"] = Field("openvino", description="kind of engine: compute with OpenVINO")
    device: str = Field(
        "CPU", description="CPU, GPU, NPU, or another device that `perilune doctor` lists; AUTO prefers a GPU"
    )
    weights: Literal["float32", "int8"] = Field(
        "float32", description="how the engine stores matrices; int8 has one scale per output channel"
    )
    cache: Literal["float32", "u8"] = Field(
        "float32",
        description="how the engine stores keys and values; float32 stores them in the engine's `precision`",
    )
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="precision of the engine's matrix products; a lower precision widens the gap between"
        " its log-probs and the learner's; the stage fails if the device does not compute in it",
    )

    def runner(self) -> OpenVino:
        """Return the settings as the engine takes them."""
        from perilune.engine.openvino_runner import OpenVino

        return OpenVino(**self.model_dump(exclude={"name"}))


class TrainedServerSpec(ServerSpec):
    """The fields of the `engine` section of a training stage, which sends its weights to the server."""

    precision: Literal["float32", "bfloat16"] = Field(
        "bfloat16",
        description="only in an rl stage: precision of the server's matrix products, which determines how"
        " much its log-probs may differ from the learner's",
    )
    sleep: bool = Field(
        False,
        description="only in an rl stage: the server frees its memory while the policy learns",
    )

    @property
    def rounding(self) -> Rounding:
        """The bounds on the gap to the learner: those of a GPU, because another program computes."""
        from perilune.metrics.rounding import ROUNDING

        return ROUNDING[self.precision, "cuda"]


def _default_to_server(value: Any) -> Any:
    """Add `name: server` to a section without a name."""
    return {"name": "server", **value} if isinstance(value, dict) else value


EngineField = Annotated[
    Annotated[ServerSpec | OpenVinoSpec | None, Field(discriminator="name")],
    BeforeValidator(_default_to_server),
    NameOrSection(("openvino",)),
]
"""Type of a field that selects the engine: null for Perilune's own, `openvino`, or a server `{url: ...}`."""

TrainingEngineField = Annotated[
    Annotated[TrainedServerSpec | OpenVinoSpec | None, Field(discriminator="name")],
    BeforeValidator(_default_to_server),
    NameOrSection(("openvino",)),
]
"""As `EngineField`, for a stage that trains the policy."""


@dataclass(frozen=True)
class Sampler:
    """A sampling backend with its tokenizer, and the policy of sub-agents."""

    engine: SamplingBackend
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    sub_agents: SubAgents = field(default_factory=SubAgents)


def check_server_temperature(engine: ServerSpec | OpenVinoSpec | None, temperature: float) -> None:
    """Check that a server accepts the temperature.

    Raises:
        ValueError: when it does not; pydantic reports the error.
    """
    if isinstance(engine, ServerSpec) and temperature > MAX_SERVER_TEMPERATURE:
        raise ValueError(
            f"temperature is {temperature:g}, and servers accept at most {MAX_SERVER_TEMPERATURE:g}."
            " Lower it, or remove engine"
        )


def check_server(spec: ServerSpec, job: Job) -> None:
    """Check the settings of a server without connecting to it.

    Raises:
        RequestError: when the URL is malformed, the recipe's secrets lack the token, or httpx is missing.
    """
    require_httpx("engine.url")
    parse_server_url(spec.url)
    if spec.token is not None and spec.token not in job.secrets:
        raise RequestError(
            f"{spec.token} is not listed in the recipe's `secrets`, and only listed variables reach a run",
            where="engine.token",
            remedy=f"add it at the top level of the recipe: secrets: [{spec.token}]",
        )


def open_server(spec: ServerSpec, workspace: Workspace) -> RemoteEngine:
    """Connect to the server.

    Raises:
        RequestError, WorkFailedError: as `RemoteEngine`.
    """
    check_server(spec, workspace.job)
    from perilune.engine.remote import RemoteEngine

    engine = RemoteEngine(
        spec.url,
        spec.model,
        token=None if spec.token is None else workspace.secret(spec.token),
        reported=spec.reported,
        concurrency=spec.concurrency,
    )
    workspace.log(f"sampling from {engine.model} at {engine.url} ({engine.server or 'unknown server'})")
    return engine


def remote_sampler(engine: RemoteEngine, workspace: Workspace) -> Sampler:
    """Return the server's engine with the tokenizer of the stage's checkpoint; reads no weights."""
    from perilune.models.checkpoints.folder import CheckpointFolder
    from perilune.models.text.template_facts import with_recipe_template
    from perilune.models.text.tokenizer import Tokenizer

    folder = workspace.starting_checkpoint()
    new = Tokenizer.for_new_model(workspace.job.model)
    tokenizer = new if folder is None else Tokenizer.load(folder)
    if not workspace.has_input("checkpoint"):
        tokenizer = with_recipe_template(tokenizer, workspace.job.model)
    ends = () if folder is None else CheckpointFolder(folder).end_tokens()
    return Sampler(engine, tokenizer, tuple(dict.fromkeys((*ends, tokenizer.eos_token_id))))
