"""Results of an engine, and their comparison with the requests."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .shapes import Request

MOST_DEVIATIONS = 6  # largest difference of two engines' means, in standard deviations
LEAST_DIFFERENCE = 0.02  # in nats per token, which rounding may cause


@dataclass(frozen=True, slots=True)
class Outcome:
    """Samples in the order of the requests. Samples of one request are adjacent.

    Attributes:
        tokens: sampled tokens of every sample.
        logprobs: of every sampled token, under its sampling distribution; None if not available.
        first_token: `time.perf_counter()` at the first token of any sample.
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]] | None
    first_token: float | None = None


def check(requests: Sequence[Request], outcome: Outcome, vocab: int) -> tuple[list[str], dict[str, Any]]:
    """Faults of an outcome at temperature 1, and statistics in which engines should agree."""
    faults = []
    wanted = [request.new_tokens for request in requests for _ in range(request.n)]
    got = [len(sample) for sample in outcome.tokens]
    if got != wanted:
        short = sum(a < b for a, b in zip(got, wanted, strict=False))
        faults.append(f"{len(got)} samples of {len(wanted)}, {short} of them too short")
    if not all(0 <= int(token) < vocab for sample in outcome.tokens for token in sample):
        faults.append("tokens outside the vocabulary")
    if len({tuple(map(int, sample)) for sample in outcome.tokens}) < len(outcome.tokens):
        faults.append("samples that are the same")
    figures: dict[str, Any] = {"tokens": sum(got), "mean_logprob": None, "logprob_deviation": None}
    if outcome.logprobs is not None:
        values = [float(value) for sample in outcome.logprobs for value in sample]
        if len(values) != sum(got) or not all(math.isfinite(value) and value <= 1e-4 for value in values):
            faults.append("log-probs that are missing or are none")
        else:
            figures["mean_logprob"] = statistics.fmean(values)
            figures["logprob_deviation"] = statistics.pstdev(values)
    return faults, figures


def drawn_alike(mine: dict[str, Any], reference: dict[str, Any]) -> bool:
    """True if the mean log-probs of two engines' samples differ by no more than chance explains.

    They differ more if an engine leaves out unlikely tokens, or uses another temperature.
    """
    means = [engine["mean_logprob"] for engine in (mine, reference)]
    if None in means:
        return True
    variance = sum(engine["logprob_deviation"] ** 2 / engine["tokens"] for engine in (mine, reference))
    return abs(means[0] - means[1]) <= MOST_DEVIATIONS * math.sqrt(variance) + LEAST_DIFFERENCE


def agreement(mine: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The agreement of greedy tokens and log-probs of two engines.

    Returns:
        `tokens`: share of the tokens before the first difference in their prompt; `logprob_difference`: the
        largest difference among those tokens, None if an engine gives no log-probs.
    """
    same = total = 0
    largest: float | None = None
    for index, (a, b) in enumerate(zip(mine["tokens"], reference["tokens"], strict=True)):
        equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        same, total = same + equal, total + len(b)
        if mine["logprobs"] and reference["logprobs"]:
            pairs = zip(mine["logprobs"][index][:equal], reference["logprobs"][index][:equal], strict=True)
            largest = max([largest or 0.0, *(abs(x - y) for x, y in pairs)])
    return {"tokens": same / total, "logprob_difference": largest}
