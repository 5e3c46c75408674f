"""Result page of the recipes for SmolLM2-135M-Instruct."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leads.text import change, listed
from recipe_runs import describe_differences

Run = Mapping[str, Any]
Arm = tuple[str, str]  # a recipe, and a stage or STAGE/PART

COMPARED: Mapping[str, Sequence[tuple[Arm, Arm]]] = {  # by environment: an arm, and what it is compared with
    "sums": (
        (("arithmetic", "after_sft"), ("arithmetic", "before")),
        (("arithmetic", "after_rl"), ("arithmetic", "after_sft")),
    ),
    "requests": (
        (("instructions", "after_rl"), ("instructions", "before")),
        (("lora", "after_rl"), ("lora", "before")),
        (("preference", "after_dpo"), ("preference", "before")),
        (("flywheel", "after_flywheel"), ("flywheel", "before")),
        (("lora", "after_rl"), ("instructions", "after_rl")),
        (("preference", "after_dpo"), ("instructions", "after_rl")),
        (("flywheel", "after_flywheel"), ("instructions", "after_rl")),
    ),
    "families": tuple(
        (("families", f"after_rl/{part}"), ("families", f"after_sft/{part}"))
        for part in ("letters", "divisors", "relatives")
    ),
    "calculator": ((("calculator", "after_rl"), ("calculator", "after_sft")),),
    "system prompt": (
        (("system_prompt", "told"), ("system_prompt", "untold")),
        (("system_prompt", "after_on_policy"), ("system_prompt", "untold")),
        (("system_prompt", "after_off_policy"), ("system_prompt", "untold")),
    ),
}
ABOUT = (
    "The comparisons are of pass@1. Each names a recipe and one of its evaluations, as in "
    "`arithmetic/after_rl`. `instructions`, `lora`, `preference` and `flywheel` start from the same model "
    "and are evaluated on the same tasks. In `system_prompt`, only the evaluation `told` shows the system "
    "prompt to the model. Intervals in the table *Evaluations* are 95% intervals over the tasks of one seed. "
    "Other programs used the machines, too, so the seconds are upper bounds. Differences are tested [over "
    "paired seeds](index.md#differences-over-seeds), and Holm's method corrects for the comparisons in the "
    "same environment."
)


def view(document: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of evaluations, of differences over seeds, and of training costs."""
    runs: Sequence[Run] = document["runs"]
    rates = {
        ((run["recipe"], stage), run["seed"]): float(figures["pass@1"]["mean"])
        for run in runs
        for stage, figures in _evaluations(run)
    }
    findings: list[str] = []
    rows: list[dict[str, Any]] = []
    for pairs in COMPARED.values():
        differences = {
            f"`{'/'.join(arm)}` against `{'/'.join(other)}`": [
                rates[arm, seed] - rates[other, seed]
                for own, seed in sorted(rates)
                if own == arm and (other, seed) in rates
            ]
            for arm, other in pairs
        }
        sentences, tests = describe_differences(
            {name: values for name, values in differences.items() if values}
        )
        findings += sentences
        rows += tests
    all_seeds = " ".join(map(str, sorted({run["seed"] for run in runs})))
    return {
        "title": "Recipes for SmolLM2-135M",
        "lead": lead(rows),
        "about": ABOUT,
        "findings": findings,
        "command": f"python benchmarks/smollm2.py --seeds {all_seeds}",
        "evaluations": [
            _labels(run, stage)
            | {
                "pass@1": figures["pass@1"],
                "greedy": figures.get("greedy"),
                "tokens per answer": figures["length"]["mean"] if "length" in figures else None,
            }
            for run in runs
            for stage, figures in _evaluations(run)
        ],
        "differences": [
            {
                "comparison": row["comparison"],
                "difference of pass@1 by seed": row["by seed"],
                "conclusion": row["conclusion"],
            }
            for row in rows
        ],
        "training": [
            _labels(run, stage)
            | {
                "seconds": figures["seconds"],
                "peak GiB": figures.get("peak GiB"),
                "perplexity of English before": figures["perplexity of English"][0],
                "perplexity of English after": figures["perplexity of English"][1],
                "KL to the start, nats per answer": figures["KL to the start, nats per answer"],
            }
            for run in runs
            for stage, figures in run["stages"].items()
            if "perplexity of English" in figures
        ],
        **_other_environments(runs),
        "versions": runs[-1]["versions"],
        "processor": ", ".join(sorted({run["processor"] for run in runs})),
    }


def lead(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The recipes, and what RL changes in three of them."""
    changes = [
        f"{change(next(row for row in rows if row['comparison'] == f'`{arm}` against `{other}`'))} {words}"
        for arm, other, words in (
            ("instructions/after_rl", "instructions/before", "on instructions"),
            ("arithmetic/after_rl", "arithmetic/after_sft", "on sums after SFT"),
            ("calculator/after_rl", "calculator/after_sft", "with a calculator after SFT"),
        )
    ]
    return (
        "The recipes in `recipes/smollm2/` train SmolLM2-135M-Instruct (135 million parameters) on two CPU "
        "cores and evaluate it on held-out tasks.",
        f"RL changes pass@1 by {listed(changes)}.",
    )


def _evaluations(run: Run) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The figures of each evaluation, and those of each part of a mixture as STAGE/PART."""
    for stage, figures in run["stages"].items():
        if "pass@1" in figures:
            yield stage, figures
        for part, rate in figures.get("parts", {}).items():
            yield f"{stage}/{part}", {"pass@1": rate}


def _other_environments(runs: Sequence[Run]) -> dict[str, Any]:
    """A table of pass@1 in environments that a stage did not train on, if any run has it."""
    rows = [
        _labels(run, stage) | {"environment": name, "pass@1 before": rates[0], "pass@1 after": rates[1]}
        for run in runs
        for stage, figures in run["stages"].items()
        for name, rates in figures.get("other environments", {}).items()
    ]
    return {"other environments": rows} if rows else {}


def _labels(run: Run, stage: str) -> dict[str, Any]:
    return {"recipe": run["recipe"], "seed": run["seed"], "stage": stage}
