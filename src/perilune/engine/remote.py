"""Sampling from a server: vLLM, SGLang, `perilune serve`, or a server with the API of one of them."""

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
_MOST_BYTES = 256 << 20  # in one answer


class RemoteEngine:
    """Samples from a server with the interface of `Engine`.

    `owned_by` in /v1/models identifies the server: "sglang" is called at /generate, any other at
    /v1/completions. `perilune serve` returns the same samples as `Engine` with the same weights. Other
    servers draw their own samples, and their policy version is always 0.

    Args:
        url: URL of the server's root or of its /v1, http or https.
        model: name of the model on the server; optional when the server has one model.
        token: bearer token.
        reported: the distribution of the server's log-probs. By default "raw" for vLLM, unless it was started
            with --logprobs-mode processed_logprobs, and "tempered" for SGLang, unless
            SGLANG_RETURN_ORIGINAL_LOGPROB is set there.
        concurrency: most requests at once; each is a prompt with all of its samples.
        timeout: seconds to wait for one answer.

    Raises:
        RequestError: when the URL is invalid, or the server rejects the model or the token.
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
        # One connection per thread.
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
        """None: a server does not report the longest sequence of its model."""
        return None

    def close(self) -> None:
        """Close the connections."""
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

        `on_progress(finished, total)` is called when the samples of a prompt have arrived.

        Raises:
            RequestError: when the server refuses the request, or its log-probs are not under the distribution
                sampled from.
            WorkFailedError: when the server fails, stays busy, or returns no token ids.
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

    def _find(self, requested: str | None) -> tuple[str, str]:
        """The name of the model on the server, and the kind of server."""
        answer = self._request("GET", "/v1/models")
        listed = answer.get("data") if isinstance(answer, Mapping) else None
        cards = [card for card in listed or () if isinstance(card, Mapping)]
        owners = {str(card.get("id")): str(card.get("owned_by", "")) for card in cards}
        if requested is None and len(owners) == 1:
            return next(iter(owners.items()))
        if requested in owners:
            return str(requested), owners[str(requested)]
        problem = "no model is named" if requested is None else f"has no model {requested!r}"
        raise RequestError(problem, where=self.url, remedy=f"one of: {', '.join(owners) or 'none'}")

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request, and retry a few times when the server is busy or restarts."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                status, headers, content = self._exchange(method, path, body)
            except httpx.TransportError as error:
                # The message may name the host, but never the token.
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
            remedy="see the server's log; lower `concurrency` if it is busy",
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
            404: "check that the URL is that of an OpenAI-compatible server",
        }.get(status, "")
        what = f"the server refuses with {status}: {_message(content)}"
        if status >= 500:
            raise WorkFailedError(what, where=self.url, remedy="see the server's log")
        raise RequestError(what, where=self.url, remedy=remedy)

    def _check(self, params: SamplingParams) -> None:
        if params.raw_logprobs or params.top_logprobs:
            raise RequestError(
                "a server only returns the log-probs of sampled tokens",
                where="raw_logprobs, top_logprobs",
            )
        ranks = get_args(Reported)
        if ranks.index(self._reported) < ranks.index(needed(params)):
            raise RequestError(
                f"the server's log-probs are {self._reported}, but with these parameters only"
                f" {needed(params)} log-probs are under the distribution sampled from",
                where=self.url,
                remedy="sample at temperature 1 without top-k, top-p or min-p; or start vLLM with"
                " --logprobs-mode processed_logprobs and set `reported: processed`",
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
            "the URL contains a password, which would be written to files",
            remedy="name an environment variable that holds the token",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _wait(headers: Mapping[str, str], attempt: int) -> float:
    """Seconds until the next attempt: what the server requests, otherwise doubling each time."""
    try:
        seconds = float(headers.get("Retry-After", ""))
    except ValueError:  # a date, or nothing
        seconds = 0.25 * 2**attempt
    return min(max(seconds, 0.0), _LONGEST_WAIT)


def _message(content: bytes) -> str:
    """The message of an error body, in one short line."""
    text = content.decode(errors="replace")
    try:
        document = json.loads(text)
        error = document.get("error", document) if isinstance(document, dict) else document
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, RecursionError):
        pass
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:299] + "…"
