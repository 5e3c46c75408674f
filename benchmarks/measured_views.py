"""Tables for result pages whose JSON holds raw records: the quickstart, `generate` and TRL."""

from collections.abc import Mapping
from typing import Any

Document = Mapping[str, Any]


def quickstart_view(document: Document) -> dict[str, Any]:
    """One table row per seed and evaluation, and the time of each stage."""
    runs = document["runs"]
    gap = max(run["logprob_gap_max"] for run in runs)
    evaluations = [{"seed": run["seed"]} | _evaluation(row) for run in runs for row in run["evaluations"]]
    stages = [
        {"seed": run["seed"]} | {stage["name"]: stage["seconds"] for stage in run["stages"]} for run in runs
    ]
    return {
        "title": "Quickstart with three seeds",
        "findings": [
            f"The largest difference between the sampler's and the learner's log-prob of a token was {gap:g} "
            "nats."
        ],
        "about": "Intervals are 95% bootstrap intervals over the 256 held-out tasks. A *direct* answer is a "
        "bare sum. A *scratchpad* answer is a sum after written working. In these runs the `rl` stage "
        "started with the second moments of the optimizer of the `sft` stage. It now starts with a fresh "
        "optimizer, as in the table of the README.",
        "command": document["command"],
        "evaluations": evaluations,
        "seconds per stage": stages,
        "seconds in the rl stage": [{"seed": run["seed"]} | run["split_seconds"] for run in runs],
        "versions": document["versions"],
        "processor": document["processor"],
    }


def _evaluation(one: Mapping[str, Any]) -> dict[str, Any]:
    strategies = {
        f"share of {name} answers": one["strategies"].get(name, {}).get("share", 0.0)
        for name in ("direct", "scratchpad")
    }
    gain = one["gain"] and one["gain"]["pass@1"]
    return {
        "stage": one["stage"],
        "pass@1": one["pass@1"],
        "gain of pass@1 over the previous evaluation": gain,
        "pass@8": one["pass@8"],
        "greedy": one["greedy"],
        "tokens per answer": one["length"]["mean"],
        **strategies,
    }


def generate_view(document: Document) -> dict[str, Any]:
    """One table row per workload: tokens per second, and ratios."""
    rows = []
    for result in document["results"]:
        speed, cpu = result["tokens_per_second"], result["times_as_fast_as_generate"]
        rows.append(
            {
                "prompts": result["prompts"],
                "samples per prompt": result["samples"],
                "answers end": result["ends"],
                "threads": result["threads"],
                "speed of Perilune / speed of generate, by elapsed time": cpu["wall"],
                "speed of Perilune / speed of generate, by CPU time": cpu["processor"],
                "Perilune, tokens/s": speed["engine"],
                "generate, tokens/s": speed["generate"],
                "generate with log-probs, tokens/s": speed["generate_with_logprobs"],
            }
        )
    rest = {key: value for key, value in document.items() if key != "results"}
    return {
        "title": "Sampling speed: Perilune against transformers",
        "about": "Perilune's engine always returns the log-prob of each token. `generate` was measured "
        "without and with log-probs. The ratios compare Perilune with `generate` without log-probs. A row "
        "is a median of rounds in which the samplers take turns.",
        "tokens per second": rows,
        **rest,
    }


def trl_view(document: Document) -> dict[str, Any]:
    """Seconds per step of Perilune and TRL, and their ratio."""
    ours, trl, ratio = (document[name] for name in ("perilune", "trl", "trl_over_perilune"))
    low, _, high = ours["quartiles_of_total_seconds"]
    rows = {
        part.replace("_", " and "): {
            "Perilune": seconds,
            "TRL": trl["seconds"][part],
            "time of TRL / time of Perilune": ratio["seconds"][part],
        }
        for part, seconds in ours["seconds"].items()
    }
    return {
        "title": "GRPO step time: Perilune against TRL",
        "about": "Both start from the same model, a tiny one that SFT taught three-digit sums, and have the "
        f"same prompts and reward. Half of Perilune's steps take {low:.3f} to {high:.3f} s. CPU times give "
        "the same ratios.",
        "command": document["command"],
        "median seconds per step": rows,
        "mean per step": {
            "Perilune": {"sampled tokens": ours["tokens_mean"], "reward": ours["reward_mean"]},
            "TRL": {"sampled tokens": trl["tokens_mean"], "reward": trl["reward_mean"]},
        },
        "seconds from start to first step": {
            "Perilune": ours["start_to_first_step_seconds"],
            "TRL": trl["start_to_first_step_seconds"],
        },
        "versions": trl["versions"],
        "processor": document["processor"],
    }
