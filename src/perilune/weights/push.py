"""Send weights to a server: `perilune serve --weight-updates`, vLLM in its development mode, or SGLang."""

from __future__ import annotations

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from perilune.errors import RequestError, WorkFailedError
from perilune.files import read_json, sha256_file
from perilune.models.adapters.files import CONFIG
from perilune.servers import JsonClient, NoJsonError, ServerError
from perilune.weights.checkpoint import load_tensors
from perilune.weights.delta import CopyComparison, Update, WeightWriter

_MAX_ATTEMPTS = 8  # failed uploads in a row, after which a push fails
_MAX_WAIT_S = 10.0  # longest time between two uploads
_AUTHENTICATE = "name the environment variable with the server's token: --token-env NAME"


@dataclass(frozen=True)
class PushResult:
    """The result of a push.

    Attributes:
        version: of the server's weights; None if the server does not number them.
        bytes: sent over the network; 0 if the server reads the files itself.
        changed: share of the values that changed; 1 if that was not measured.
    """

    server: str
    version: int | None
    bytes: int
    changed: float
    seconds: float


class WeightServer(ABC):
    """A server that can load new weights.

    `perilune serve --control`, vLLM with --enable-sleep-mode and SGLang with --enable-memory-saver can sleep.
    """

    def __init__(self, http: _Http) -> None:
        self._http = http
        self._asleep = False

    def sleep(self) -> None:
        """Free the memory of the weights and the KV cache, when no request is in flight.

        Raises:
            RequestError, WorkFailedError: when the server cannot sleep, or does not answer.
        """
        self._free_memory()
        self._asleep = True

    def wake_up(self, part: Literal["weights", "kv_cache"]) -> None:
        """Restore a part of the memory: first the weights, which must then be pushed, then the KV cache.

        Raises:
            RequestError, WorkFailedError: when the server refuses, or does not answer.
        """
        self._restore_memory(part)
        self._asleep = part == "weights"

    def _free_memory(self) -> None:
        self._http.json("POST", "/sleep?level=1", {})  # vLLM keeps the weights in host memory

    def _restore_memory(self, part: str) -> None:
        self._http.json("POST", f"/wake_up?tags={part}", {})

    @abstractmethod
    def push(self, folder: Path, base: Path | None, report: Callable[[int, int], None]) -> PushResult:
        """Make the server use the checkpoint in `folder`.

        Args:
            base: the checkpoint that the server has, to send only changes; None to send all values.
            report: called with the number of bytes that the server has received, and the total.

        Raises:
            RequestError, WorkFailedError: when the server does not load the weights.
        """


def find_server(url: str, token: str | None) -> WeightServer:
    """Return a client for the server at `url`, whose list of models names the program.

    Raises:
        RequestError: when `url` is malformed, or the server is another program or refuses the token.
        WorkFailedError: when the server does not answer.
    """
    http = _Http(url, token)
    cards = http.json("GET", "/v1/models").get("data") or [{}]
    owner = cards[0].get("owned_by")
    if owner == "vllm":
        return VLLMServer(http)
    if owner == "perilune":
        return PeriluneServer(http)
    if owner == "sglang":
        return SGLangServer(http)
    raise RequestError(
        f"unsupported server: {owner!r}", where=url, remedy="push to perilune serve, vLLM or SGLang"
    )


class PeriluneServer(WeightServer):
    """A Perilune server. It receives one file in the dtypes of its model; an interrupted transfer resumes."""

    def push(self, folder: Path, base: Path | None, report: Callable[[int, int], None]) -> PushResult:
        began = time.monotonic()
        state = self._http.json("GET", "/v1/weights")
        with tempfile.TemporaryDirectory(prefix="perilune-push-") as scratch:
            update = _write_update(Path(scratch), folder, base, state)
            self.send(update.path, state["chunk_bytes"], report)
            used = self._use(sha256_file(update.path), update.result)
        seconds = time.monotonic() - began
        return PushResult("perilune", used["version"], update.bytes, update.changed, seconds)

    def send(
        self, path: Path, chunk: int, report: Callable[[int, int], None] = lambda sent, total: None
    ) -> None:
        """Send the bytes of a file that the server does not have yet."""
        digest, total, failures = sha256_file(path), path.stat().st_size, 0
        while True:
            sent = int(self._http.json("GET", f"/v1/weights/{digest}")["received"])
            try:
                while sent < total:
                    report(sent, total)
                    sent = self._send_chunk(path, digest, sent, chunk, total)
                    failures = 0
                report(sent, total)
                return
            except _NoAnswerError as error:
                failures += 1
                if failures >= _MAX_ATTEMPTS:
                    raise WorkFailedError(
                        f"the connection was lost at byte {sent:,} of {total:,}: {error.what}",
                        where=error.where,
                        remedy="push again; the transfer resumes there",
                    ) from None
                time.sleep(min(0.25 * 2**failures, _MAX_WAIT_S))

    def _use(self, file: str, result: str) -> Any:
        """Apply a file that the server has, and return the version and digest of the weights."""
        try:
            return self._http.json("POST", "/v1/weights", {"file": file})
        except RequestError:
            state = self._http.json("GET", "/v1/weights")
            if state["digest"] != result:
                raise
            return state  # an earlier request, whose response was lost, has applied the file

    def _send_chunk(self, path: Path, digest: str, first: int, chunk: int, total: int) -> int:
        with path.open("rb") as file:
            file.seek(first)
            data = file.read(chunk)
        byte_range = f"bytes {first}-{first + len(data) - 1}/{total}"
        options = {"headers": {"Content-Range": byte_range}, "retry": False}
        return int(self._http.json("PUT", f"/v1/weights/{digest}", data, **options)["received"])


class FolderServer(WeightServer):
    """A server that can read the checkpoint's folder under the same path."""

    name: str

    def push(self, folder: Path, base: Path | None, report: Callable[[int, int], None]) -> PushResult:
        began = time.monotonic()
        if (folder / CONFIG).exists():
            self._load_adapter(folder)
        else:
            self._load_paused(folder)
        return PushResult(self.name.lower(), None, 0, 1.0, time.monotonic() - began)

    def _load_paused(self, folder: Path) -> None:
        """Load a checkpoint while the server computes nothing; a server that sleeps needs no pause."""
        path = str(folder.absolute())
        if not self._asleep:
            self._pause()
        try:
            self._load(path)
        except (RequestError, WorkFailedError) as error:
            raise WorkFailedError(
                f"{self.name} could not load the weights and stays paused;"
                f" it may have a part of them ({error})",
                where=path,
                remedy=f"see the log of {self.name}, then push again or restart {self.name}",
            ) from None
        if not self._asleep:
            self._resume()

    @abstractmethod
    def _load_adapter(self, folder: Path) -> None: ...

    @abstractmethod
    def _pause(self) -> None: ...

    @abstractmethod
    def _load(self, path: str) -> None: ...

    @abstractmethod
    def _resume(self) -> None: ...


class VLLMServer(FolderServer):
    """A vLLM server with VLLM_SERVER_DEV_MODE=1, or for adapters with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.

    Requests in flight are paused and continue with the new weights on their old KV cache, which later
    requests do not reuse. A new adapter replaces the adapter with the folder's name, without a pause.
    """

    name = "vLLM"

    def _load_adapter(self, folder: Path) -> None:
        adapter = {"lora_name": folder.name, "lora_path": str(folder.absolute()), "load_inplace": True}
        self._http.post("/v1/load_lora_adapter", adapter)

    def _load_paused(self, folder: Path) -> None:
        self._check_output_weights(folder)
        super()._load_paused(folder)

    def _check_output_weights(self, folder: Path) -> None:
        """Refuse tied embeddings on a CPU, where vLLM 0.32 keeps its packed old output weights."""
        if not read_json(folder / "config.json").get("tie_word_embeddings", False):
            return
        try:
            found = self._http.json("GET", "/server_info?config_format=json").get("vllm_config")
        except RequestError:  # older versions of vLLM do not describe themselves
            return
        config = found if isinstance(found, dict) else {}  # a text in some versions of vLLM
        if config.get("device_config", {}).get("device") == "cpu":
            raise RequestError(
                "vLLM on a CPU would keep the old output weights of this model (tied embeddings)",
                where=str(folder),
                remedy="restart vLLM with the checkpoint, or use perilune serve --weight-updates",
            )

    def _pause(self) -> None:
        self._http.post("/pause?mode=keep", {})

    def _load(self, path: str) -> None:
        arguments = {"weights_path": path, "is_checkpoint_format": True}
        self._http.post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})

    def _resume(self) -> None:
        self._http.post("/reset_prefix_cache", {})
        self._http.post("/resume", {})


class SGLangServer(FolderServer):
    """An SGLang server.

    Requests in flight continue with the new weights, which first recompute their KV cache. While the server
    sleeps, it keeps no copy of the weights.
    """

    name = "SGLang"

    def _free_memory(self) -> None:
        self._http.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    def _restore_memory(self, part: str) -> None:
        self._http.post("/resume_memory_occupation", {"tags": [part]})

    def _load_adapter(self, folder: Path) -> None:
        raise RequestError(
            "SGLang does not replace a loaded adapter",
            where=str(folder),
            remedy="merge the adapter into its base model first, and push that",
        )

    def _pause(self) -> None:
        self._http.post("/pause_generation", {"mode": "retract"})

    def _load(self, path: str) -> None:
        self._http.post("/update_weights_from_disk", {"model_path": path, "flush_cache": True})

    def _resume(self) -> None:
        self._http.post("/continue_generation", {})


def _write_update(scratch: Path, folder: Path, base: Path | None, has: Mapping[str, Any]) -> Update:
    """Write the update from the server's weights to the checkpoint in `folder`."""
    writer, finder = WeightWriter("full"), None
    if base is not None:
        from_base, finder = WeightWriter("delta"), CopyComparison()
        before = from_base.write(scratch / "base", load_tensors(base, has["tensors"]), has["version"], finder)
        before.path.unlink()
        writer = from_base if before.result == has["digest"] else writer
    return writer.write(scratch / "update", load_tensors(folder, has["tensors"]), has["version"] + 1, finder)


class _NoAnswerError(WorkFailedError):
    """The server does not answer, or stays busy."""


class _Http:
    """Requests to one server."""

    def __init__(self, url: str, token: str | None) -> None:
        self._client = JsonClient(url, token=token)

    def json(
        self, method: str, path: str, body: Mapping[str, Any] | bytes | None = None, **options: Any
    ) -> Any:
        """Return the answer, {} if it is not JSON. `options` are those of `JsonClient.request`.

        Raises:
            RequestError: when the server refuses.
            WorkFailedError: when it fails, stays busy, or does not answer.
        """
        try:
            return self._client.request(method, path, body, **options)
        except NoJsonError:
            return {}
        except ServerError as error:
            message, where = f"{method} {path}: {error.what}", self._client.url
            if error.is_refusal:
                remedies = {401: _AUTHENTICATE, 404: _missing_endpoint(path, error.what)}
                raise RequestError(message, where=where, remedy=remedies.get(error.status, "")) from None
            remedy = "check the address, and whether the server runs"
            if error.status or not options.get("retry", True):
                remedy = "see the server's log, then push again; a paused server stays paused until then"
            kind = _NoAnswerError if error.may_pass else WorkFailedError
            raise kind(message, where=where, remedy=remedy) from None

    def post(self, path: str, body: Mapping[str, Any]) -> None:
        """Send one request, without repeating it: the server may have carried it out."""
        self.json("POST", path, body, retry=False)


def _missing_endpoint(path: str, answer: str) -> str:
    """Return the remedy for status 404."""
    if "not arrived completely" in answer:
        return "run the same command again"
    if path.startswith(("/sleep", "/wake_up")):
        return (
            "start it with: perilune serve --weight-updates --control,"
            " or VLLM_SERVER_DEV_MODE=1 vllm serve --enable-sleep-mode"
        )
    if path.startswith(("/pause_generation", "/update_weights", "/release_memory", "/resume_memory")):
        return "update SGLang"
    return (
        "start it with: perilune serve --weight-updates, or VLLM_SERVER_DEV_MODE=1 vllm serve"
        " (VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 for adapters)"
    )
