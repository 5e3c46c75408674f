"""Who samples for a task: our engine with the stage's checkpoint, or a server that holds the weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from perilune.bundle.job import Frozen, Job
from perilune.errors import RequestError

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace
    from perilune.engine.backend import SamplingBackend
    from perilune.engine.remote import RemoteEngine
    from perilune.engine.request import SamplingParams
    from perilune.models.text.tokenizer import Tokenizer


class SamplingSpec(Frozen):
    """Fields of every stage that samples answers."""

    max_tokens: int = Field(64, ge=1, description="longest answer in tokens")
    temperature: float = Field(1.0, gt=0, description="of sampling; log-probs are taken at it too")

    def params(self, stop_token_ids: tuple[int, ...], *, greedy: bool = False) -> SamplingParams:
        """As the engine wants them."""
        from perilune.engine.request import SamplingParams

        return SamplingParams(self.max_tokens, 0.0 if greedy else self.temperature, stop_token_ids)


class ServerSpec(Frozen):
    """A server that samples: the fields of a stage's `engine` section."""

    url: str = Field(
        description="of an OpenAI-compatible server (vLLM, SGLang, perilune serve), with or without /v1"
    )
    model: str | None = Field(
        None, description="name by which the server knows it; the only one it has, if left out"
    )
    token: str | None = Field(
        None,
        description="name of the environment variable that holds the server's token; list it in `secrets`",
    )
    reported: Literal["raw", "tempered", "processed"] | None = Field(
        None,
        description="its log-probs: of the model, after temperature, or after all; by default as known of it",
    )
    concurrency: int = Field(32, ge=1, le=1024, description="most requests at once")


@dataclass(frozen=True)
class Sampler:
    """What samples, and the tokenizer that its tokens belong to."""

    engine: SamplingBackend
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]


def check_server(spec: ServerSpec, job: Job) -> None:
    """Refuse what cannot work, before any of it is tried.

    Raises:
        RequestError: when the URL is none, the token is no secret of the recipe, or httpx is missing.
    """
    try:
        from perilune.engine.remote import server_root
    except ModuleNotFoundError as error:
        raise RequestError(
            f"a server is asked through the package {error.name}, which is not installed",
            where="engine.url",
            remedy="pip install 'perilune[remote]'",
        ) from None

    server_root(spec.url)
    if spec.token is not None and spec.token not in job.secrets:
        raise RequestError(
            f"{spec.token} is not among the recipe's secrets, and only those reach a run",
            where="engine.token",
            remedy=f"add it, by its name, beside `stages`: secrets: [{spec.token}]",
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
    """The server, with the tokenizer of the checkpoint; no weights are read."""
    from perilune.models.text.tokenizer import Tokenizer

    folder = next(
        (workspace.input(name) for name in ("checkpoint", "model") if workspace.has_input(name)), None
    )
    tokenizer = Tokenizer.characters() if folder is None else Tokenizer.load(folder)
    template = workspace.job.model.get("chat_template")
    if template and not workspace.has_input("checkpoint"):
        tokenizer = tokenizer.with_chat_template(template, where="model.chat_template")
    ends = () if folder is None else _end_tokens(folder)
    return Sampler(engine, tokenizer, tuple(dict.fromkeys((*ends, tokenizer.eos_token_id))))


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """What ends an answer, by config.json and generation_config.json."""
    from perilune.files import read_json
    from perilune.models.config.decoder_config import DecoderConfig

    files = [file for name in ("config.json", "generation_config.json") if (file := folder / name).is_file()]
    return tuple(end for file in files for end in DecoderConfig.end_tokens(read_json(file), where=str(file)))
