"""Results in a sentence, computed from the JSON, for pages that otherwise show only tables."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

Document = Mapping[str, Any]


def _control_plane(document: Document) -> str:
    times = {name: time["median"] for name, time in document["milliseconds"].items()}
    live = f"{document['live runs']} live runs"
    return (
        f"Listing the latest runs takes {times['list the latest runs']:.0f} ms, and reconciling {live} takes "
        f"{times[f'reconcile {live}']:.0f} ms (medians)."
    )


def _environments(document: Document) -> str:
    times = [row["separate process, µs per step"] for row in document["environments"].values()]
    return f"In a separate process, a step takes {min(times):.0f} to {max(times):,.0f} µs of CPU time."


def _family_agreement(document: Document) -> str:
    rows = document["largest difference"].values()
    errors = [row[kind] for row in rows for kind in row if kind.endswith("against transformers")]
    ways = max(row["KV cache, against one pass"] for row in rows)
    agree = f"differ by at most {ways:.1e} nats" if ways else "agree in every bit"
    return (
        f"In {len(rows)} families, Perilune's log-probs differ from those of transformers by at most "
        f"{max(errors):.1e} nats, and its two ways to compute them {agree}."
    )


def _game_teachers(document: Document) -> str:
    matches = [row for row in document["matches"] if row["against"] == "random"]
    won = sum(row["mean return"].partition("(")[2].startswith("+") for row in matches)
    return (
        f"In {won} of {len(matches)} matches against random play, the 95% interval of the teacher's mean "
        "return is above 0."
    )


def _live_page(document: Document) -> str:
    (watching,), (beside,) = document["watching a run"], document["training beside a page"]
    mean, low, high = (beside[f"slow-down, percent, {bound}"] for bound in ("mean", "low", "high"))
    return (
        f"A point appears after {watching['median delay, seconds']:.2f} s (median). The page changes the "
        f"time of a training step by {mean:+.1f}% ({low:+.1f} to {high:+.1f})."
    )


def _matrix_products(document: Document) -> str:
    ratios = [row["times as fast as torch"] for row in document["GFLOP/s"]]
    return f"In float32, the kernels are {min(ratios):.2f} to {max(ratios):.2f} times as fast as torch."


def _passes_cuda(document: Document) -> str:
    shares = [row["share_of_best_rate"] for row in document["training"] if row["precision"] == "bfloat16"]
    return f"In bfloat16, training passes reach {min(shares):.0%} to {max(shares):.0%} of the best rate."


def _prefix_cache(document: Document) -> str:
    model = document["hits"][-1]["model"]
    hits = {row["rule"]: median(row["hits"]) for row in document["hits"] if row["model"] == model}
    (speed,) = document["offloading"]
    return (
        f"In the model with windows, plain LRU finds {hits['plain LRU']:.0%} of the prompt tokens in the "
        f"cache, the tail rule {hits['tail rule']:.0%}, and the tail rule with announced pauses "
        f"{hits['announced']:.0%}. With offloading, the engine takes {speed['seconds with']:.1f} s instead "
        f"of {speed['seconds without']:.1f} s."
    )


def _processes(document: Document) -> str:
    arms = document["seconds per step"]
    totals = [f"{median(row['total']):.2f} s with {name}" for name, row in arms.items()]
    return f"A step takes {', '.join(totals[:-1])}, and {totals[-1]}."


def _real_model(document: Document) -> str:
    ratios = document["times_as_fast_as_trl"]
    return (
        f"A step takes {ratios['float32']} times as long in TRL as in Perilune in float32, and "
        f"{ratios['bfloat16']} times as long as in Perilune with bfloat16 products."
    )


def _sandbox(document: Document) -> str:
    probes = document["probes"].values()
    contained = sum(probe["all mechanisms"] == "contained" for probe in probes)
    return f"With all mechanisms, {contained} of {len(probes)} probes are contained."


def _serve_overhead(document: Document) -> str:
    added = document["CPU time added by the server, microseconds per token"]
    changes = [f"{time:+.1f} µs for {name.removeprefix('server, ')}" for name, time in added.items()]
    return (
        f"The server changes the median CPU time of a token by {' and by '.join(changes)}. The ranges in the "
        "table show the noise."
    )


def _staging(document: Document) -> str:
    sent = {name: median(sizes) for name, sizes in document["measured"]["pipe, second: megabytes"].items()}
    return f"The second run transfers {sent['now']:.2f} MB. Before, it transferred {sent['before']:.0f} MB."


def _weight_precision(document: Document) -> str:
    errors: dict[str, list[float]] = {}
    intervals = []
    for row in document["against float32"]:
        errors.setdefault(row["weights"], []).append(row["log-prob error, mean"])
        intervals.append(row["difference of pass@1"])
    worst = [f"{max(values):.4f} nats with {kind}" for kind, values in errors.items()]
    without = sum(interval["low"] <= 0 <= interval["high"] for interval in intervals)
    share = f"All {without}" if without == len(intervals) else f"{without} of the {len(intervals)}"
    return (
        f"The mean error of a log-prob is at most {' and '.join(worst)}. {share} intervals "
        f"for the difference of pass@1 contain 0."
    )


OUTCOMES: Mapping[str, Callable[[Document], str]] = {
    "control_plane": _control_plane,
    "environments": _environments,
    "family_agreement": _family_agreement,
    "game_teachers": _game_teachers,
    "live_page": _live_page,
    "matrix_products": _matrix_products,
    "passes_cuda": _passes_cuda,
    "prefix_cache": _prefix_cache,
    "processes": _processes,
    "real_model": _real_model,
    "sandbox": _sandbox,
    "serve_overhead": _serve_overhead,
    "staging": _staging,
    "weight_precision": _weight_precision,
}
