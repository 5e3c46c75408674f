"""Sampling from a server: vLLM, SGLang, `perilune serve`, or a server with the API of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.engine.wire import (
    Dialect,
    LogprobStage,
    MalformedError,
    OpenAICompletions,
    SGLangGenerate,
    malformed_answer,
    required_logprobs,
)
from perilune.errors import RequestError, WorkFailedError
from perilune.servers import JsonClient, ServerError

_AUTHENTICATE = "name the environment variable that holds the server's token"
_CHECK_URL = "check that the URL is that of an OpenAI-compatible server"
_REMEDIES = {401: _AUTHENTICATE, 403: _AUTHENTICATE, 404: _CHECK_URL}


class RemoteEngine:
    """Samples from a server with the interface of `Engine`.

    `owned_by` in /v1/models identifies the server: "sglang" is called at /generate, any other server at
    /v1/completions. `perilune serve` returns the same samples as `Engine` with the same weights. Other
    servers draw with their own random numbers, and do not report the version of their weights.

    Args:
        url: URL of the server's root or of its /v1, http or https.
        model: name of the model on the server; optional when the server has one model.
        token: bearer token.
        reported: the distribution of the server's log-probs. By default "raw" for vLLM, unless it was started
            with --logprobs-mode processed_logprobs, and "tempered" for SGLang, unless
            SGLANG_RETURN_ORIGINAL_LOGPROB is set there.
        concurrency: maximum number of concurrent requests. A request asks for all samples of one prompt.
        timeout: seconds to wait for one answer.

    Attributes:
        positions: most tokens of prompt and sample together; None if the server does not report it.
        version: the policy version to record for all samples; callers set it when they replace the server's
            weights. With None, samples have the version that the server reports, or 0 if it reports none.

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
        reported: LogprobStage | None = None,
        concurrency: int = 32,
        timeout: float = 600.0,
    ) -> None:
        self._client = JsonClient(url, token=token, timeout=timeout, connections=concurrency)
        self.url, self._concurrency = self._client.url, concurrency
        try:
            card = self._find_model(model)
        except BaseException:
            self.close()
            raise
        self.model, self.server = str(card.get("id")), str(card.get("owned_by", ""))
        length = card.get("max_model_len")
        self.positions = length if isinstance(length, int) else None
        self._dialect: Dialect = OpenAICompletions(is_perilune=self.server == "perilune")
        if self.server == "sglang":
            self._dialect = SGLangGenerate()
        self._reported = reported or self._dialect.reported
        self.version: int | None = None

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
            pending = {threads.submit(self._sample, prompt, n, params): i for i, prompt in enumerate(prompts)}
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

    def _sample(self, prompt: Prompt, n: int, params: SamplingParams) -> list[Completion]:
        body = self._dialect.make_body(self.model, prompt, n, params)
        answer = self._request("POST", self._dialect.path, body)
        try:
            completions = self._dialect.parse(answer, n)
            for completion in completions:
                count = len(completion.token_ids)
                if not 1 <= count <= params.max_tokens:
                    raise MalformedError(f"a sample has {count} tokens of {params.max_tokens}")
        except MalformedError as error:
            raise malformed_answer(error, self.url) from None
        if self.version is None:
            return completions
        return [
            replace(completion, policy_version=np.full_like(completion.token_ids, self.version))
            for completion in completions
        ]

    def _find_model(self, requested: str | None) -> Mapping[str, Any]:
        """Return the entry of the model in the server's list."""
        answer = self._request("GET", "/v1/models")
        models = answer.get("data") if isinstance(answer, Mapping) else None
        cards = {str(card.get("id")): card for card in models or () if isinstance(card, Mapping)}
        if requested is None and len(cards) == 1:
            return next(iter(cards.values()))
        if requested in cards:
            return cards[requested]
        problem = f"the server has no model {requested!r}"
        if requested is None:
            problem = f"no model is named, and the server has {len(cards)}"
        raise RequestError(problem, where=self.url, remedy=f"one of: {', '.join(cards) or 'none'}")

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return self._client.request(method, path, body)
        except ServerError as error:
            if error.is_refusal:
                remedy = _REMEDIES.get(error.status, "")
                raise RequestError(error.what, where=self.url, remedy=remedy) from None
            remedy = "see the server's log; lower `concurrency` if it is busy"
            raise WorkFailedError(error.what, where=self.url, remedy=remedy) from None

    def _check(self, params: SamplingParams) -> None:
        if params.raw_logprobs or params.top_logprobs:
            raise RequestError(
                "a server only returns the log-probs of sampled tokens",
                where="raw_logprobs, top_logprobs",
            )
        ranks = get_args(LogprobStage)
        if ranks.index(self._reported) < ranks.index(required_logprobs(params)):
            raise RequestError(
                f"the server's log-probs are {self._reported}, but with these parameters only"
                f" {required_logprobs(params)} log-probs are under the distribution sampled from",
                where=self.url,
                remedy="sample at temperature 1 without top-k, top-p or min-p; or start vLLM with"
                " --logprobs-mode processed_logprobs and set `reported: processed`",
            )
