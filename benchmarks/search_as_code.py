"""Compare calls of one search stack from code and with single function calls, for several seeds.

    python benchmarks/search_as_code.py [--seeds 0 1 2] [--home FOLDER]

Runs search_as_code.yaml: for each mode a cold start from nothing, then held-out questions about corpora as
large as in training, and 16 times as large. Writes results/search_as_code.json.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from perilune.metrics.across_seeds import compare_over_seeds
from recipe_runs import (
    HERE,
    SEEDS_ARE_THE_UNIT,
    document,
    for_seeds,
    mean_pass_rate,
    options,
    run_recipe,
    write,
)

RECIPE = HERE / "search_as_code.yaml"
MODES = {"calls": "single calls", "code": "code"}
CORPORA = {"": "100 companies, about 580 documents", "_large": "1,600 companies, about 9,300 documents"}
KINDS = {0.0: "one search", 1.0: "two searches", 2.0: "count over many documents"}
FEWER_TOKENS = 80  # expected reduction in percent
ABOUT = f"""\
The model learns from scratch, from 1,200 demonstrations for each arm. In the arm `code`, it writes Python
that calls the search functions in the sandbox, and sees only the output of the code. In the arm `calls`, it
calls the same functions one at a time, and every result enters its context. The evaluation uses corpora that
are not in training. The smaller ones have the same size as those in training.

* A token is one character.
* *Observed tokens* are the results in the context.
* *Tokens of the whole context* also count the question and all text of the model.
* {SEEDS_ARE_THE_UNIT}

The model copies the names of a question into one of three programs. On larger corpora the accuracy stays the
same because of these programs and the BM25 search, not because of the weights. A tiny model does not show
that a language model would choose such programs by itself, or how it handles documents in English. The number
of tokens that each arm needs depends on the demonstrations. The result depends on the length of SFT: with 600
demonstrations and 200 steps at a constant learning rate, instead of 400 steps with a falling one, pass@1 with
single calls was 44 to 47% for one of three seeds."""


def main() -> None:
    parser = options(__doc__, "search_as_code")
    parser.add_argument(
        "--home", type=Path, help="keep the runs in this folder, and reuse those that are there"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="perilune-benchmark-") as folder:
        home = arguments.home or Path(folder)
        rows = for_seeds(lambda seed: rows_of(seed, home), arguments.seeds, arguments.jobs)
    provenance = document("search_as_code.py", ["--seeds", *map(str, arguments.seeds)], began)
    if arguments.home:  # earlier calls may have made some runs
        del provenance["minutes"]
    write(arguments.out, report(rows) | provenance)


def rows_of(seed: int, home: Path) -> list[dict[str, Any]]:
    """One row for each mode and size of the corpora."""
    run = run_recipe(RECIPE, seed, home=home)
    return [
        {"seed": seed, "mode": mode, "corpora": corpora, "pass@1": mean_pass_rate(run[mode + size])}
        | contexts(run[mode + size])
        for size, corpora in CORPORA.items()
        for mode in MODES
    ]


def contexts(stage: Mapping[str, Any]) -> dict[str, Any]:
    """Mean tokens of an episode, and pass@1 for each kind of question."""
    columns = ["prompt_ids", "token_ids", "loss_mask"]
    table = pq.read_table(stage["folder"] / "artifacts" / "episodes" / "step-000000.parquet", columns=columns)
    episodes = table.to_pylist()
    levels = {level["difficulty"]: level["pass@1"] for level in stage["summary"]["by_difficulty"]}
    return {
        "observed tokens": fmean(item["loss_mask"].count(False) for item in episodes),
        "written tokens": fmean(item["loss_mask"].count(True) for item in episodes),
        "tokens of the whole context": fmean(
            len(item["prompt_ids"]) + len(item["token_ids"]) for item in episodes
        ),
        **{f"pass@1, {name}": levels[level] for level, name in KINDS.items()},
    }


def report(by_seed: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """The page: comparisons over seeds, then all rows."""
    comparisons = compare_over_seeds(
        {
            f"{what}, {corpora}": [difference(rows, corpora, what) for rows in by_seed]
            for corpora in CORPORA.values()
            for what in ("pass@1", "observed tokens", "tokens of the whole context")
        }
    )
    names = ("mode", "corpora", "pass@1", "observed tokens", "tokens of the whole context")
    findings = [
        f"{described(name)}: {comparison.describe(is_share=name.startswith('pass@1'))}"
        + ("." if name.startswith("pass@1") else f"; {ratio(by_seed, *reversed(name.split(', ', 1)))}.")
        for name, comparison in comparisons.items()
    ]
    return {
        "title": "Search as code against single function calls",
        "about": ABOUT,
        "findings": findings,
        "over seeds": [
            {key: rows[0][key] if key in ("mode", "corpora") else [row[key] for row in rows] for key in names}
            for rows in zip(*by_seed, strict=True)
        ],
        "by seed": [row for rows in by_seed for row in rows],
    }


def described(name: str) -> str:
    """What is compared, and on which corpora."""
    what, _, corpora = name.partition(", ")
    return f"{what} with code against single calls ({corpora})"


def difference(rows: Sequence[Mapping[str, Any]], corpora: str, what: str) -> float:
    """Code minus single calls, for one seed."""
    values = {row["mode"]: row[what] for row in rows if row["corpora"] == corpora}
    return float(values["code"] - values["calls"])


def ratio(by_seed: Sequence[Sequence[Mapping[str, Any]]], corpora: str, what: str) -> str:
    """The reduction in tokens for each seed, and whether it is as large as expected."""
    shares = []
    for rows in by_seed:
        values = {row["mode"]: row[what] for row in rows if row["corpora"] == corpora}
        shares.append(100 * (1 - values["code"] / values["calls"]))
    outcome = "confirmed" if min(shares) >= FEWER_TOKENS else "not confirmed"
    listed = ", ".join(f"{share:.0f}%" for share in shares)
    return f"by seed {listed} fewer (expected: at least {FEWER_TOKENS}% with every seed; {outcome})"


if __name__ == "__main__":
    main()
