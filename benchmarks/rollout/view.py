"""The result page on rollouts: tables by workload and number of cores, and a comparison in sentences.

All numbers come from the records. Engines are compared round by round, because the engines of a round ran one
after the other.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OURS, SMALLER, BASE = "perilune", "perilune-int8", "transformers"
GOAL = 3.0  # times as fast as `generate`
LEVEL = 0.95  # a ratio from which on two engines count as level: runs differ by this much
UNDISTURBED = 0.9  # share of the seconds that a process of one thread should get

Record = Mapping[str, Any]


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its records as tables, and with paragraphs that compare the engines."""
    records = document["records"]
    shown = {key: value for key, value in document.items() if key != "records"}
    shown["about"] = "\n\n".join([document["about"], *standing(records)])
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        cores = "one core" if record["cores"] == 1 else f"{record['cores']} cores"
        groups.setdefault(record["workload"], {}).setdefault(cores, []).append(_row(record))
    used = {record["model"] for record in records}
    shown["models"] = {name: text for name, text in document["models"].items() if name in used}
    return {**shown, **groups, "versions": _versions(records), "measured": _measured(records)}


def _row(record: Record) -> dict[str, Any]:
    row = {"model": record["model"], "weights": record["weights"], "engine": record["engine"]}
    if "failed" in record:
        return {**row, "KV cache": f"failed: {record['failed']}"}
    seconds, tokens = record["seconds"], record["tokens"]
    row |= {"KV cache": record["kv_cache"], "tokens per second": [tokens / one for one in seconds]}
    row["share of the floor's speed"] = _percent(sum(record["floor"].values()) / statistics.median(seconds))
    if record["workload"] == "single":
        first = record["first_token_seconds"]
        after = [(tokens - 1) / (all_ - one) for one, all_ in zip(first, seconds, strict=True)]
        row |= {"seconds to the first token": first, "tokens per second after it": after}
        floor = record["floor"]["decode"] + record["floor"]["cache"]
        row["share of the floor's speed after it"] = _percent(statistics.median(after) * floor / (tokens - 1))
    row |= {"peak MB": round(record["peak_mb"]), "greedy tokens equal to transformers": ""}
    if record["greedy"] is not None:
        row["greedy tokens equal to transformers"] = _percent(record["greedy"]["tokens"])
        row["log-prob difference"] = record["greedy"]["logprob_difference"]
    row["mean log-prob"] = None if record["mean_logprob"] is None else round(record["mean_logprob"], 3)
    return row | ({"wrong": ", ".join(record["faults"])} if record["faults"] else {})


def standing(records: Sequence[Record]) -> list[str]:
    """Paragraphs: ratios to `generate` and to the fastest other engine, and the cases where we are slower."""
    cases: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if "failed" not in record and not record["faults"]:
            key = tuple(record[name] for name in ("workload", "cores", "model", "weights"))
            cases.setdefault(key, {})[record["engine"]] = record
    cases = {key: engines for key, engines in cases.items() if OURS in engines and len(engines) > 1}
    if not cases:
        return ["Perilune's engine has not been compared with another engine yet."]
    paragraphs = []
    against = {key: _ratio(engines[OURS], engines[BASE]) for key, engines in cases.items() if BASE in engines}
    if against:
        goal = sum(ratio >= GOAL for ratio in against.values())
        paragraphs.append(
            f"Perilune's engine is {_span(against.values())} times as fast as `generate` of transformers, "
            f"and at least {GOAL:g} times as fast in {goal} of {len(against)} comparisons."
        )
    best = {key: _best(engines) for key, engines in cases.items()}
    best = {key: name for key, name in best.items() if name and not name.startswith(BASE)}
    ratios = {key: _ratio(cases[key][OURS], cases[key][name]) for key, name in best.items()}
    behind = {key: ratio for key, ratio in ratios.items() if ratio < LEVEL}
    if ratios:
        paragraphs.append(
            f"Perilune's engine is {_span(ratios.values())} times as fast as the fastest other engine of "
            f"each comparison, and at least {LEVEL:g} times as fast in "
            f"{len(ratios) - len(behind)} of {len(ratios)}."
        )
    reasons = [
        f"* {_name(key)}: {ratio:.2f} times as fast as {best[key]}. {_why(cases[key], best[key])}"
        for key, ratio in sorted(behind.items(), key=lambda item: item[1])
    ]
    if reasons:
        paragraphs.append(
            "Perilune's engine is slower than another engine in these cases:\n\n" + "\n".join(reasons)
        )
    busy = [one for engines in cases.values() for one in engines.values() if _disturbed(one)]
    if busy:
        paragraphs.append(
            f"In {len(busy)} of {sum(map(len, cases.values()))} measurements other processes used the same "
            "cores. For these, trust the ratios more than the absolute speeds."
        )
    heavier = [key for key, name in best.items() if cases[key][OURS]["peak_mb"] > cases[key][name]["peak_mb"]]
    if heavier:
        most = max(cases[key][OURS]["peak_mb"] / cases[key][best[key]]["peak_mb"] for key in heavier)
        paragraphs.append(
            "The peak memory of Perilune's engine is higher than that of the fastest other engine in "
            f"{len(heavier)} of {len(best)} comparisons, at most {most:.1f} times as high. Python, torch "
            "and the engine take about 230 MB without any model, which is most of the memory for model T. "
            "A float32 or bfloat16 KV cache is four or two times as large as the u8 cache of other engines. "
            "`perilune-int8` has an int8 cache."
        )
    return paragraphs


def _disturbed(record: Record) -> bool:
    """Whether a process of one thread had its core for less than nine tenths of the time."""
    shares = [a / b for a, b in zip(record["processor_seconds"], record["seconds"], strict=True)]
    return record["cores"] == 1 and statistics.median(shares) < UNDISTURBED


def _ratio(ours: Record, other: Record) -> float:
    """How many times as fast we are: the median over rounds when both ran in the same ones."""
    if ours["measured_at"] == other["measured_at"]:
        pairs = zip(ours["seconds"], other["seconds"], strict=True)
        return statistics.median(b / a for a, b in pairs)
    return statistics.median(other["seconds"]) / statistics.median(ours["seconds"])


def _best(engines: Mapping[str, Record]) -> str | None:
    """The fastest that is not ours."""
    others = [name for name in engines if not name.startswith(OURS)]
    return min(others, key=lambda name: statistics.median(engines[name]["seconds"]), default=None)


def _why(engines: Mapping[str, Record], name: str) -> str:
    """What the records say about the difference."""
    ours, other = engines[OURS], engines[name]
    missing = statistics.median(ours["seconds"]) - statistics.median(other["seconds"])
    sentences = []
    if split := ours.get("split_ms"):
        outside = sum(split[part] for part in ("schedule", "draw", "rest"))
        share = outside / (outside + split["run"])
        sentences.append(
            f"The model takes {_percent(1 - share)} of a step of {outside + split['run']:.2f} ms, drawing "
            f"tokens {split['draw']:.2f} ms, and scheduling and other work {outside - split['draw']:.2f} ms. "
            f"The model alone would be {_without(ours, other, share)}."
        )
    if ours["kv_cache"] != other["kv_cache"]:
        cache = ours["floor"]["cache"]
        sentences.append(
            f"Perilune's KV cache is in {ours['kv_cache']}, that of {other['engine']} in {other['kv_cache']}."
            f" Reading Perilune's cache takes at least {cache:.2g} s, {_percent(cache / missing)} of the"
            " difference."
        )
    if SMALLER in engines:
        small = engines[SMALLER]
        sentences.append(
            f"With an {small['kv_cache']} cache it is {_ratio(small, other):.2f} times as fast as {name}."
        )
    first, theirs = ours["first_token_seconds"], other["first_token_seconds"]
    if ours["workload"] == "single" and None not in (*first, *theirs):
        later = statistics.median(first) - statistics.median(theirs)
        sentences.append(f"The prompt accounts for {_percent(later / missing)} of the difference.")
    least = sum(ours["floor"].values())
    shares = [_percent(least / statistics.median(one["seconds"])) for one in (ours, other)]
    return " ".join(
        [
            *sentences,
            f"Perilune reaches {shares[0]} of the speed of the floor, and {other['engine']} {shares[1]}.",
        ]
    )


def _without(ours: Record, other: Record, share: float) -> str:
    return f"{_ratio(ours, other) / (1 - share):.2f} times as fast as {other['engine']}"


def _name(key: tuple[Any, ...]) -> str:
    workload, cores, model, weights = key
    return f"{model} {workload}, {weights}, {'one core' if cores == 1 else f'{cores} cores'}"


def _span(values: Any) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _versions(records: Sequence[Record]) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in sorted(records, key=lambda record: record["measured_at"]):
        if "versions" in record:
            found[record["engine"]] = ", ".join(
                f"{name} {number}" for name, number in record["versions"].items()
            )
    return found


def _measured(records: Sequence[Record]) -> dict[str, Any]:
    """When, how busy the machine was, and what its cores can do."""
    times = sorted(record["measured_at"] for record in records)
    loads = [value for record in records for value in record["load_average"]]
    found: dict[str, Any] = {"first": times[0], "last": times[-1], "load average": _span(loads)}
    for cores in sorted({record["cores"] for record in records}):
        limits = [one["limits"] for one in records if one["cores"] == cores and "limits" in one]
        if limits:
            best = {
                f"{dtype} GFLOP/s": max(one["product"][dtype] for one in limits) / 1e9
                for dtype in limits[0]["product"]
            }
            best["read GB/s"] = max(one["read"] for one in limits) / 1e9
            text = ", ".join(f"{name} {value:.3g}" for name, value in best.items())
            found[f"best rates of {cores} core{'s' * (cores > 1)}"] = text
    return found
