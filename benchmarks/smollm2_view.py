"""Result page of the recipes for SmolLM2-135M-Instruct."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipe_runs import SEEDS_ARE_THE_UNIT, describe_differences, described

Run = Mapping[str, Any]

COMPARED = (  # (recipe, stage) against (recipe, stage)
    (("arithmetic", "after_sft"), ("arithmetic", "before")),
    (("arithmetic", "after_rl"), ("arithmetic", "after_sft")),
    (("instructions", "after_rl"), ("instructions", "before")),
    (("preference", "after_dpo"), ("preference", "before")),
    (("preference", "after_dpo"), ("instructions", "after_rl")),
)
ABOUT = (
    "The recipes in `recipes/smollm2/` train SmolLM2-135M-Instruct (135 million parameters) on two CPU cores "
    "and evaluate it on held-out tasks. `instructions` and `preference` start from the same model and are "
    "evaluated on the same requests. Intervals are 95% bootstrap intervals over the tasks of one seed. Other "
    "programs used the machines too, and some stages of seeds 1 and 2 were suspended meanwhile, so "
    f"the seconds are upper bounds. {SEEDS_ARE_THE_UNIT}"
)


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of evaluations, of differences over seeds, and of training costs."""
    runs: Sequence[Run] = document["runs"]
    by_key = {(run["recipe"], run["seed"]): run["stages"] for run in runs}

    def rate(recipe: str, seed: int, stage: str) -> float:
        return float(by_key[recipe, seed][stage]["pass@1"]["mean"])

    differences = {}
    for (recipe, stage), (other, reference) in COMPARED:
        seeds = sorted(seed for name, seed in by_key if name == recipe and (other, seed) in by_key)
        if seeds:
            differences[f"`{recipe}/{stage}` against `{other}/{reference}`"] = [
                by_key[recipe, seed][stage]["pass@1"]["mean"]
                - by_key[other, seed][reference]["pass@1"]["mean"]
                for seed in seeds
            ]
    findings, rows = describe_differences(differences)
    all_seeds = " ".join(map(str, sorted({run["seed"] for run in runs})))
    return {
        "title": "Recipes for SmolLM2-135M",
        "about": described(ABOUT, findings),
        "command": f"python benchmarks/smollm2.py --seeds {all_seeds}",
        "evaluations": [
            _labels(run, name)
            | {"pass@1": row["pass@1"], "greedy": row["greedy"], "tokens per answer": row["length"]["mean"]}
            for run in runs
            for name, row in run["stages"].items()
            if "pass@1" in row
        ],
        "differences": [{key: row[key] for key in ("comparison", "by seed", "conclusion")} for row in rows],
        "training": [
            _labels(run, name)
            | {
                "seconds": row["seconds"],
                "peak GiB": row["peak GiB"],
                "perplexity of English before": row["perplexity of English"][0],
                "after": row["perplexity of English"][1],
                "KL to the start, nats per answer": row["KL to the start, nats per answer"],
            }
            for run in runs
            for name, row in run["stages"].items()
            if "peak GiB" in row
        ],
        "versions": runs[-1]["versions"],
        "processor": ", ".join(sorted({run["processor"] for run in runs})),
    }


def _labels(run: Run, stage: str) -> dict[str, Any]:
    return {"recipe": run["recipe"], "seed": run["seed"], "stage": stage}
