"""Result page on rollouts: tables by workload and number of cores, and a comparison in sentences.

All numbers come from the records. Engines are compared round by round, because the engines of a round ran one
after the other.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OURS, SMALLER, BASE = "perilune", "perilune-int8", "transformers"
GOAL = 3.0  # times as fast as `generate`
LEVEL = 0.95  # two engines with a higher ratio count as equally fast, since runs differ by this much
UNDISTURBED = 0.9  # share of the seconds that a process of one thread should get

SETUP = (
    "Perilune's engine, `generate` of transformers, OpenVINO GenAI and llama.cpp run the same sampling "
    "workloads with models of three sizes on one and two CPU cores."
)
SLOWER = """\
The table shows the other cases. The *gap* is the time of Perilune's engine minus the time of the fastest
other engine:

* *Relative speed* is Perilune's speed divided by the speed of the other engine.
* *Step* is the time of a step of Perilune's engine.
* *Model alone* is the relative speed if Perilune's sampling and scheduling took no time.
* *int8 cache* is the relative speed of `perilune-int8`, if it was measured.
* *Cache reads* is the minimum time to read Perilune's KV cache, as a share of the gap. The table shows it if
  the caches of the two engines have different number formats.
* *Prompt* is the difference between the times to the first token, as a share of the gap. Above 100%, Perilune
  is faster after the first token.
* *Floor* is an engine's speed as a share of the speed at the floor (see below)."""

Record = Mapping[str, Any]


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its records as tables, and with paragraphs that compare the engines."""
    records = document["records"]
    page = {key: value for key, value in document.items() if key != "records"}
    speed, *details = standing(records)
    page |= {"lead": (SETUP, speed), "findings": "\n\n".join(details)}
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        cores = "one core" if record["cores"] == 1 else f"{record['cores']} cores"
        groups.setdefault(record["workload"], {}).setdefault(cores, []).append(_row(record))
    used = {record["model"] for record in records}
    page["models"] = {name: text for name, text in document["models"].items() if name in used}
    return {**page, **groups, "versions": _versions(records), "measured": _measured(records)}


def _row(record: Record) -> dict[str, Any]:
    row = {"model": record["model"], "weights": record["weights"], "engine": record["engine"]}
    if "failed" in record:
        return {**row, "KV cache": f"failed: {record['failed']}"}
    seconds, tokens = record["seconds"], record["tokens"]
    row |= {"KV cache": record["kv_cache"], "tokens per second": [tokens / time for time in seconds]}
    row["share of the floor's speed"] = _percent(sum(record["floor"].values()) / statistics.median(seconds))
    if record["workload"] == "single":
        first = record["first_token_seconds"]
        after = [(tokens - 1) / (all_ - start) for start, all_ in zip(first, seconds, strict=True)]
        row |= {"seconds to the first token": first, "tokens per second after it": after}
        floor = record["floor"]["decode"] + record["floor"]["cache"]
        row["share of the floor's speed after it"] = _percent(statistics.median(after) * floor / (tokens - 1))
    row |= {"peak MB": round(record["peak_mb"]), "greedy tokens equal to transformers": ""}
    if record["greedy"] is not None:
        row["greedy tokens equal to transformers"] = _percent(record["greedy"]["tokens"])
        row["log-prob difference, nats"] = record["greedy"]["logprob_difference"]
    row["mean log-prob, nats"] = None if record["mean_logprob"] is None else round(record["mean_logprob"], 3)
    return row | ({"wrong": ", ".join(record["faults"])} if record["faults"] else {})


def standing(records: Sequence[Record]) -> list[str]:
    """A sentence with the ratios to `generate` and to the fastest other engine, then paragraphs."""
    cases: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if "failed" not in record and not record["faults"]:
            key = tuple(record[name] for name in ("workload", "cores", "model", "weights"))
            cases.setdefault(key, {})[record["engine"]] = record
    cases = {key: engines for key, engines in cases.items() if OURS in engines and len(engines) > 1}
    if not cases:
        return ["Perilune's engine has not been compared with another engine yet."]
    parts, paragraphs = [], []
    against = {key: _ratio(engines[OURS], engines[BASE]) for key, engines in cases.items() if BASE in engines}
    if against:
        goal = sum(ratio >= GOAL for ratio in against.values())
        parts.append(f"{_span(against.values())} times as fast as `generate` of transformers")
        paragraphs.append(
            f"Perilune's engine is at least {GOAL:g} times as fast as `generate` in {goal} of {len(against)} "
            "comparisons."
        )
    best = {key: _best(engines) for key, engines in cases.items()}
    best = {key: name for key, name in best.items() if name and not name.startswith(BASE)}
    ratios = {key: _ratio(cases[key][OURS], cases[key][name]) for key, name in best.items()}
    behind = {key: ratio for key, ratio in ratios.items() if ratio < LEVEL}
    if ratios:
        parts.append(f"{_span(ratios.values())} times as fast as the fastest other engine")
        paragraphs.append(
            f"Perilune's engine is at least {LEVEL:g} times as fast as the fastest other engine in "
            f"{len(ratios) - len(behind)} of {len(ratios)} comparisons."
        )
    slower = [
        _reasons(key, cases[key], best[key], ratio)
        for key, ratio in sorted(behind.items(), key=lambda item: item[1])
    ]
    if slower:
        paragraphs += [SLOWER, _table(slower)]
    alone = [record for engines in cases.values() for record in engines.values() if record["cores"] == 1]
    busy = [record for record in alone if _disturbed(record)]
    if busy:
        paragraphs.append(
            f"In {len(busy)} of {len(alone)} measurements on one core, other processes took more than a "
            "tenth of the core's time. There, trust the ratios more than the absolute speeds."
        )
    heavier = [key for key, name in best.items() if cases[key][OURS]["peak_mb"] > cases[key][name]["peak_mb"]]
    if heavier:
        most = max(cases[key][OURS]["peak_mb"] / cases[key][best[key]]["peak_mb"] for key in heavier)
        paragraphs.append(
            "The peak memory of Perilune's engine is higher than that of the fastest other engine in "
            f"{len(heavier)} of {len(best)} comparisons, by a factor of at most {most:.1f}. Python, torch "
            "and the engine take about 230 MB without any model, which is most of the memory for model T. A "
            "KV cache in float32 is four times as large as OpenVINO's cache in u8, and one in bfloat16 is "
            "twice as large. `perilune-int8` has an int8 cache."
        )
    return [f"Perilune's engine is {', and '.join(parts)}.", *paragraphs]


def _disturbed(record: Record) -> bool:
    """True if a process of one thread had its core for less than nine tenths of the time."""
    shares = [a / b for a, b in zip(record["processor_seconds"], record["seconds"], strict=True)]
    return statistics.median(shares) < UNDISTURBED


def _ratio(ours: Record, other: Record) -> float:
    """Our speed divided by the other's: the median over rounds if both ran in the same rounds."""
    if ours["measured_at"] == other["measured_at"]:
        pairs = zip(ours["seconds"], other["seconds"], strict=True)
        return statistics.median(b / a for a, b in pairs)
    return statistics.median(other["seconds"]) / statistics.median(ours["seconds"])


def _best(engines: Mapping[str, Record]) -> str | None:
    """The fastest engine that is not ours."""
    others = [name for name in engines if not name.startswith(OURS)]
    return min(others, key=lambda name: statistics.median(engines[name]["seconds"]), default=None)


def _reasons(key: tuple[Any, ...], engines: Mapping[str, Record], name: str, ratio: float) -> dict[str, str]:
    """One case in which we are slower, with what the records say about the gap."""
    ours, other = engines[OURS], engines[name]
    gap = statistics.median(ours["seconds"]) - statistics.median(other["seconds"])
    row = {"case": _name(key), "other engine": name, "relative speed": f"{ratio:.2f}"}
    row |= dict.fromkeys(("step, ms", "model alone", "int8 cache", "cache reads", "prompt"), "")
    if split := ours.get("split_ms"):
        outside = sum(split[part] for part in ("schedule", "draw", "rest"))
        step = outside + split["run"]
        row |= {"step, ms": f"{step:.2f}", "model alone": f"{ratio * step / split['run']:.2f}"}
    if SMALLER in engines:
        row["int8 cache"] = f"{_ratio(engines[SMALLER], other):.2f}"
    if ours["kv_cache"] != other["kv_cache"]:
        row["cache reads"] = _percent(ours["floor"]["cache"] / gap)
    first, other_first = ours["first_token_seconds"], other["first_token_seconds"]
    if ours["workload"] == "single" and None not in (*first, *other_first):
        row["prompt"] = _percent((statistics.median(first) - statistics.median(other_first)) / gap)
    least = sum(ours["floor"].values())
    for title, record in (("floor, Perilune", ours), ("floor, other", other)):
        row[title] = _percent(least / statistics.median(record["seconds"]))
    return row


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of the same keys as Markdown."""
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _name(key: tuple[Any, ...]) -> str:
    workload, cores, model, weights = key
    return f"{model} {workload}, {weights}, {'one core' if cores == 1 else f'{cores} cores'}"


def _span(values: Any) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _versions(records: Sequence[Record]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for record in sorted(records, key=lambda record: record["measured_at"]):
        if "versions" in record:
            versions[record["engine"]] = ", ".join(
                f"{name} {number}" for name, number in record["versions"].items()
            )
    return versions


def _measured(records: Sequence[Record]) -> dict[str, Any]:
    """Dates, load of the machine, and highest rates of its cores."""
    times = sorted(record["measured_at"] for record in records)
    loads = [value for record in records for value in record["load_average"]]
    facts: dict[str, Any] = {"first": times[0], "last": times[-1], "load average": _span(loads)}
    for cores in sorted({record["cores"] for record in records}):
        limits = [record["limits"] for record in records if record["cores"] == cores and "limits" in record]
        if limits:
            best = {
                f"{dtype} GFLOP/s": max(rates["product"][dtype] for rates in limits) / 1e9
                for dtype in limits[0]["product"]
            }
            best["read GB/s"] = max(rates["read"] for rates in limits) / 1e9
            text = ", ".join(f"{name} {value:.3g}" for name, value in best.items())
            facts[f"best rates of {cores} core{'s' * (cores > 1)}"] = text
    return facts
