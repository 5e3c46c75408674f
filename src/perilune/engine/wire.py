"""The requests to remote sampling servers, and the parsing of their answers into token ids and log-probs.

There are two dialects. vLLM and `perilune serve` use OpenAI's completions API with vLLM's extensions
(`return_token_ids`, `stop_token_ids`, `top_k`, ...). SGLang uses `/generate`. Requests contain every option,
because a server replaces missing options by its own defaults or those of the model's generation_config.json,
where top_p may differ from 1.

Answers are untrusted: the parser rejects anything malformed. Text is never encoded into tokens, because
another tokenization of the same text has another probability.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from perilune.engine.request import Completion, Prompt, SamplingParams
from perilune.errors import WorkFailedError

LogprobStage = Literal["raw", "tempered", "processed"]
"""The stage at which a server takes log-probs: "raw" is the model's own distribution, "tempered" after
penalties, biases and temperature, "processed" after top-k, top-p and min-p too, before drawing."""

_INT31 = 2**31


class MalformedError(Exception):
    """An answer is malformed; the message says how."""


class Dialect(Protocol):
    """The API of one kind of server.

    Attributes:
        path: path of the requests, relative to the root of the server.
        reported: the default stage at which the server takes log-probs.
    """

    path: str
    reported: LogprobStage

    def make_body(self, model: str, prompt: Prompt, n: int, params: SamplingParams) -> dict[str, Any]:
        """Return the JSON document to post."""

    def parse(self, answer: Any, n: int) -> list[Completion]:
        """Return the samples in an answer, in order.

        Raises:
            MalformedError: when the answer does not follow this dialect.
        """


class OpenAICompletions:
    """/v1/completions with vLLM's extensions.

    Args:
        is_perilune: whether the server is `perilune serve`, which accepts the whole key of the random numbers
            and reports the policy version of each token.
    """

    path = "/v1/completions"

    def __init__(self, *, is_perilune: bool) -> None:
        self.is_perilune = is_perilune
        self.reported: LogprobStage = "processed" if is_perilune else "raw"

    def make_body(self, model: str, prompt: Prompt, n: int, params: SamplingParams) -> dict[str, Any]:
        """Return the JSON document to post.

        vLLM gets no seed. With a seed, it draws the samples of a batch one at a time, and vLLM 0.32 on a CPU
        exits when it prefills the prompt in several steps.
        """
        key = {"key": list(prompt.key)} if self.is_perilune else {}
        return {
            "model": model,
            "prompt": list(map(int, prompt.token_ids)),
            "n": n,
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            **_shared_options(params),
            "top_k": params.top_k,
            "ignore_eos": True,  # only the given stop tokens end a sample
            "logprobs": 0,
            "return_token_ids": True,
            **key,
        }

    def parse(self, answer: Any, n: int) -> list[Completion]:
        """Return the samples in an answer, in order."""
        choices = _list(_mapping(answer, "the answer").get("choices"), "choices", n)
        samples: dict[int, Completion] = {}
        for choice in choices:
            raw = _mapping(choice, "a choice")
            if raw.get("token_ids") is None:
                raise MalformedError("the server returns no token ids")
            tokens = raw["token_ids"]
            logprobs = _mapping(raw.get("logprobs"), "logprobs").get("token_logprobs")
            versions = raw.get("policy_version", [0] * len(tokens)) if self.is_perilune else [0] * len(tokens)
            samples[_integer(raw.get("index"), "index")] = parse_completion(
                tokens, logprobs, versions, raw.get("finish_reason"), raw.get("text")
            )
        if sorted(samples) != list(range(n)):
            raise MalformedError(f"the choices are numbered {sorted(samples)}, not 0 to {n - 1}")
        return [samples[index] for index in range(n)]


class SGLangGenerate:
    """/generate of SGLang."""

    path = "/generate"
    reported: LogprobStage = "tempered"

    def make_body(self, model: str, prompt: Prompt, n: int, params: SamplingParams) -> dict[str, Any]:
        """Return the JSON document to post. SGLang needs --enable-deterministic-inference to use the seeds.

        With n above 1, SGLang uses the same seed for all samples of a prompt, so that all of them are equal.
        So the document repeats the prompt n times with n = 1.
        """
        options = {
            "n": 1,
            "max_new_tokens": params.max_tokens,
            **_shared_options(params),
            "top_k": params.top_k or -1,
            "min_new_tokens": params.min_tokens,
        }
        seed = derive_seed(prompt.key)
        return {
            "input_ids": [list(map(int, prompt.token_ids))] * n,
            "return_logprob": True,
            "sampling_params": [{**options, "sampling_seed": (seed + i) % _INT31} for i in range(n)],
        }

    def parse(self, answer: Any, n: int) -> list[Completion]:
        """Return the samples in an answer, in order."""
        samples = []
        for sample in _list(answer if isinstance(answer, list) else [answer], "the answer", n):
            info = _mapping(_mapping(sample, "a sample").get("meta_info"), "meta_info")
            pairs = info.get("output_token_logprobs")
            if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) > 1 for p in pairs):
                raise MalformedError("the server returns no token ids")
            reason = _mapping(info.get("finish_reason"), "finish_reason").get("type")
            tokens = [pair[1] for pair in pairs]
            logprobs, versions = [pair[0] for pair in pairs], [0] * len(pairs)
            samples.append(parse_completion(tokens, logprobs, versions, reason, sample.get("text")))
        return samples


def required_logprobs(params: SamplingParams) -> LogprobStage:
    """Return the earliest stage whose log-probs are under the distribution drawn from."""
    if params.top_k or params.top_p < 1 or params.min_p > 0:
        return "processed"
    penalized = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    changed = penalized or params.logit_bias or params.min_tokens
    return "tempered" if changed or params.temperature not in (0.0, 1.0) else "raw"


def _shared_options(params: SamplingParams) -> dict[str, Any]:
    """Return the options with the same name in both dialects."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
    }


def derive_seed(key: tuple[int, int, int]) -> int:
    """Return 31 bits derived from (seed, step, task), for servers that take one number."""
    text = ",".join(map(str, key))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % _INT31


def parse_completion(tokens: Any, logprobs: Any, versions: Any, reason: Any, text: Any) -> Completion:
    """Return a sample from the fields of an answer.

    Raises:
        MalformedError: when token ids, log-probs or the finish reason are invalid.
    """
    count = len(_list(tokens, "token_ids"))
    for token in tokens:
        if not 0 <= _integer(token, "a token id") < _INT31:
            raise MalformedError(f"{token} is not a token id")
    values = [_logprob(value) for value in _list(logprobs, "token_logprobs", count)]
    for version in _list(versions, "policy_version", count):
        _integer(version, "a policy version")
    if reason not in ("stop", "length"):
        raise MalformedError(f"a sample ended with {reason!r}")
    return Completion(
        np.asarray(tokens, dtype=np.int32),
        np.asarray(values, dtype=np.float32),
        np.asarray(versions, dtype=np.int32),
        reason,
        text if isinstance(text, str) else None,
    )


def _logprob(value: Any) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not -math.inf < number < 1e-3:  # rounding may lift a token of probability 1 slightly above 0
        raise MalformedError(f"{value!r} is not a log-probability")
    return float(number)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise MalformedError(f"{what} is missing or not an object")
    return value


def _list(value: Any, what: str, length: int | None = None) -> Sequence[Any]:
    if not isinstance(value, list):
        raise MalformedError(f"{what} is missing or not a list")
    if length is not None and len(value) != length:
        raise MalformedError(f"{what} has {len(value)} entries, not {length}")
    return value


def _integer(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= _INT31:
        raise MalformedError(f"{what} is {value!r}")
    return value


def malformed_answer(error: MalformedError, where: str) -> WorkFailedError:
    """Return the error for the user."""
    if "token ids" in str(error):
        return WorkFailedError(
            f"{error}. The text cannot replace them, because another tokenization of it has another"
            " probability",
            where=where,
            remedy="sample from vLLM 0.10.2 or later, SGLang, or perilune serve",
        )
    return WorkFailedError(f"the server's answer cannot be used: {error}", where=where)
