"""Samples from a server: vLLM, SGLang, `perilune serve`, or whatever speaks like one of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NoReturn, get_args
from urllib.parse import urlsplit

import httpx

from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.engine.wire import (
    Dialect,
    Malformed,
    OpenAICompletions,
    Reported,
    SGLangGenerate,
    malformed,
    needed,
)
from perilune.errors import RequestError, WorkFailedError

_ATTEMPTS = 6
_LONGEST_WAIT = 30.0  # seconds between two attempts
_BUSY = frozenset({429, 502, 503, 504})
_MOST_BYTES = 256 << 20  # of one answer


class RemoteEngine:
    """Samples from a server; the same completions come out as from `Engine`.

    What the server is, it says itself (`owned_by` in /v1/models): "sglang" is asked at /generate, everything
    else at /v1/completions. `perilune serve` gives the very samples of `Engine` with the same weights; other
    servers draw their own, and their policy version is always 0.

    Args:
        url: of the server's root or of its /v1, http or https.
        model: name by which the server knows the model; may be left out when it serves one.
        token: sent as bearer token.
        reported: which distribution the server's log-probs are of. By default what is known of such a
            server: raw ones of vLLM, unless it was started with --logprobs-mode processed_logprobs; tempered
            ones of SGLang, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set there.
        concurrency: most requests at once; each is a prompt with all of its samples.
        timeout: seconds to wait for one answer.

    Raises:
        RequestError: when the URL is none, or the server does not know the model or the token.
        WorkFailedError: when the server does not answer.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        token: str | None = None,
        reported: Reported | None = None,
        concurrency: int = 32,
        timeout: float = 600.0,
    ) -> None:
        self.url = server_root(url)
        self._concurrency = concurrency
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Each of the threads below keeps a connection.
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client = httpx.Client(
            base_url=self.url, headers=headers, limits=limits, timeout=httpx.Timeout(timeout, connect=10.0)
        )
        try:
            self.model, self.server = self._find(model)
        except BaseException:
            self.close()
            raise
        self._dialect: Dialect = (
            SGLangGenerate() if self.server == "sglang" else OpenAICompletions(ours=self.server == "perilune")
        )
        self._reported = reported or self._dialect.reported

    @property
    def positions(self) -> None:
        """A server does not say how long its model's sequences may be."""
        return None

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt `n` times; `result[i][j]` is sample j of prompt i.

        `on_progress(finished, total)` is called when a prompt's samples are there.

        Raises:
            RequestError: when the server refuses the request, or its log-probs would be of another
                distribution than the one sampled from.
            WorkFailedError: when the server fails, stays busy, or gives no token ids.
        """
        self._check(params)
        if n == 0:
            return [[] for _ in prompts]
        results: list[list[Completion]] = [[] for _ in prompts]
        finished = 0
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="remote-engine") as threads:
            pending = {threads.submit(self._ask, prompt, n, params): i for i, prompt in enumerate(prompts)}
            try:
                for future in as_completed(pending):
                    results[pending[future]] = future.result()
                    finished += n
                    if on_progress is not None:
                        on_progress(finished, len(prompts) * n)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return results

    def _ask(self, prompt: Prompt, n: int, params: SamplingParams) -> list[Completion]:
        body = self._dialect.body(self.model, prompt, n, params)
        answer = self._request("POST", self._dialect.path, body)
        try:
            completions = self._dialect.read(answer, n)
            for one in completions:
                if not 1 <= len(one.token_ids) <= params.max_tokens:
                    raise Malformed(f"a sample has {len(one.token_ids)} tokens of {params.max_tokens}")
        except Malformed as error:
            raise malformed(error, self.url) from None
        return completions

    def _find(self, wanted: str | None) -> tuple[str, str]:
        """The model's name on the server, and who the server says it is."""
        answer = self._request("GET", "/v1/models")
        listed = answer.get("data") if isinstance(answer, Mapping) else None
        cards = [card for card in listed or () if isinstance(card, Mapping)]
        owners = {str(card.get("id")): str(card.get("owned_by", "")) for card in cards}
        if wanted is None and len(owners) == 1:
            return next(iter(owners.items()))
        if wanted in owners:
            return str(wanted), owners[str(wanted)]
        asked = "no model is named" if wanted is None else f"has no model {wanted!r}"
        raise RequestError(asked, where=self.url, remedy=f"one of: {', '.join(owners) or 'none'}")

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask until there is an answer; a server that is busy or restarts is asked again, a few times."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                status, headers, content = self._exchange(method, path, body)
            except httpx.TransportError as error:
                # Its text names the host at most; the token stands in neither.
                status, headers, content = 0, httpx.Headers(), f"{type(error).__name__}: {error}".encode()
            if status == 200:
                return self._parsed(content)
            if status not in _BUSY and status:
                self._refused(status, content)
            if attempt < _ATTEMPTS:
                time.sleep(_wait(headers, attempt))
        what = f"answers {status}" if status else "does not answer"
        raise WorkFailedError(
            f"the server {what} ({_message(content)}), {_ATTEMPTS} times",
            where=self.url,
            remedy="look at the server's log; lower concurrency when it is busy",
        )

    def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, httpx.Headers, bytes]:
        with self._client.stream(method, path, json=body) as response:
            content = bytearray()
            for part in response.iter_bytes():
                content += part
                if len(content) > _MOST_BYTES:
                    raise WorkFailedError(f"an answer is larger than {_MOST_BYTES >> 20} MiB", where=self.url)
            return response.status_code, response.headers, bytes(content)

    def _parsed(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise WorkFailedError("the server's answer is not JSON", where=self.url) from None

    def _refused(self, status: int, content: bytes) -> NoReturn:
        remedy = {
            401: "name the environment variable that holds the server's token",
            403: "name the environment variable that holds the server's token",
            404: "check the URL: it is that of an OpenAI-compatible server",
        }.get(status, "")
        what = f"the server refuses with {status}: {_message(content)}"
        if status >= 500:
            raise WorkFailedError(what, where=self.url, remedy="look at the server's log")
        raise RequestError(what, where=self.url, remedy=remedy)

    def _check(self, params: SamplingParams) -> None:
        if params.raw_logprobs or params.top_logprobs:
            raise RequestError(
                "a server is asked for the log-probs of what it sampled only",
                where="raw_logprobs, top_logprobs",
            )
        ranks = get_args(Reported)
        if ranks.index(self._reported) < ranks.index(needed(params)):
            raise RequestError(
                f"the server's log-probs are {self._reported}, and with these parameters only"
                f" {needed(params)} ones are of the distribution sampled from",
                where=self.url,
                remedy="sample at temperature 1 without top-k, top-p or min-p; or start vLLM with"
                " --logprobs-mode processed_logprobs and say reported: processed",
            )


def server_root(url: str) -> str:
    """The URL without a trailing /v1.

    Raises:
        RequestError: when it is not http or https, has no host, or holds a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise RequestError(f"{url!r} is not the URL of a server", remedy="http://HOST:PORT/v1")
    if parts.username or parts.password:
        raise RequestError(
            "a URL with a password in it ends up in files", remedy="name an environment variable as token"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _wait(headers: Mapping[str, str], attempt: int) -> float:
    """Seconds until the next attempt: what the server asks for, else twice as long each time."""
    try:
        asked = float(headers.get("Retry-After", ""))
    except ValueError:  # a date, or nothing
        asked = 0.25 * 2**attempt
    return min(max(asked, 0.0), _LONGEST_WAIT)


def _message(content: bytes) -> str:
    """What an error body says, in one short line."""
    text = content.decode(errors="replace")
    try:
        document = json.loads(text)
        told = document.get("error", document) if isinstance(document, dict) else document
        text = str(told.get("message", told) if isinstance(told, dict) else told)
    except (ValueError, RecursionError):
        pass
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"
