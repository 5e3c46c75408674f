"""Measure regression suites from episodes: planted bugs caught, false alarms, exact replays, shrinking, time.

    python benchmarks/traces.py [--shrink 1]

Runs the recipes calculator and tools, and the sums of the quickstart, with few steps; makes suites of their
episodes and of scripted episodes; then plants each bug of traces_planted.py in a copy of the source, and runs
the suite there. Writes results/traces.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.cli.inspect.recordings import record_targets
from perilune.metrics.proportion import wilson_interval
from perilune.traces.cassette import Cassette
from perilune.traces.causes import choose_cassettes, cluster_cassettes, is_held_out
from perilune.traces.suite import Case, Suite, tokenizer_digest, write_suite
from recipe_runs import HERE, document, write
from traces_material import scripted
from traces_planted import PLANTED, Planted, misplaced_bugs

SOURCE = HERE.parent / "src"
RECIPES = HERE.parent / "recipes"
STEPS = {  # traces, steps of sft, steps of rl
    "calculator": (3000, 120, 8),
    "tools": (1000, 100, 3),
    "quickstart": (3000, 100, 3),
}
ABOUT = """\
The recorded episodes ([cassettes](../reference/glossary.md)) are replayed in a copy of the source in which
one bug is planted.

* *Cases that fail* are those whose replay differs. *Differences* names what differs.
* Half of the suite is held out. *Caught by either half alone* is *yes* if each of the two halves catches the
  bug without the other.
* *Caught by rescore alone* says whether the verifier catches the bug without replaying the environment.
* *Replays without a bug* count the episodes that were replayed (*harness*) and scored again (*rescore*), the
  *false alarms* among them, and an upper bound of their share.

The authors of the suite chose the bugs. Most bugs are in environments that a tiny model cannot play. Their
episodes follow scripts, which we did not change after the first run against the bugs."""
EVALUATED, TRAINED = "after_rl", "rl"  # stages of each recipe
SCRIPTED = 36  # episodes of each scripted environment
EACH = 4  # cases of each cause in the suite
SIZE = 200  # cases of the timed suite


def perilune(home: Path, *arguments: str, source: Path = SOURCE) -> tuple[int, Any, float]:
    """Run a command of the code at `source`, and return exit code, JSON and seconds."""
    command = [sys.executable, "-m", "perilune.cli.main", *arguments, "--json"]
    own = {**os.environ, "PERILUNE_HOME": str(home), "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(command, env=own, stdout=subprocess.PIPE, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, time.monotonic() - began


def recorded_runs(home: Path) -> None:
    """Run the recipes."""
    keys = ("stages.traces.traces", "stages.sft.steps", "stages.rl.steps")
    for name, values in STEPS.items():
        settings = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
        overrides = [word for setting in settings for word in ("--set", setting)]
        code, _, _ = perilune(home, "run", str(RECIPES / f"{name}.yaml"), *overrides)
        if code:
            raise SystemExit(f"{name} failed")


def make_suite(folder: Path) -> dict[str, Any]:
    """Make the suite for all bugs, from clusters of all episodes without a bug."""
    recorded = record_targets(list(STEPS), "", 300)
    own, named = scripted(SCRIPTED)
    digests = {}
    for name, tokenizer in named.items():
        with tempfile.TemporaryDirectory() as saved:
            tokenizer.save(saved)
            digests[name] = tokenizer_digest(Path(saved))
        recorded.tokenizers[digests[name]] = tokenizer
    real = list(recorded.cassettes.values())
    own = [cassette.model_copy(update={"tokenizer": digests[cassette.tokenizer]}) for cassette in own]
    chosen = [
        (name, cassette)
        for name, part in choose_cassettes(cluster_cassettes([*real, *own]), EACH).items()
        for cassette in part
    ]
    pairs = [
        (Case(digest=cassette.digest, cause=name, held_out=is_held_out(cassette.digest, 0.5)), cassette)
        for name, cassette in chosen
    ]
    write_suite(folder, pairs, recorded.tokenizers, "")
    sampled = {cassette.digest for cassette in real}
    return {
        "recorded episodes": len(real),
        "not recorded": sum(recorded.refused.values()),
        "scripted episodes": len(own),
        "causes": len({name for name, _ in chosen}),
        "cases": len(pairs),
        "cases of sampled episodes": sum(cassette.digest in sampled for _, cassette in chosen),
    }


def planted(folder: Path, bug: Planted) -> Path:
    """Make a copy of the source with a bug."""
    copy = folder / "src"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "perilune" / bug.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    return copy


def caught(home: Path, suite: Path, folder: Path, bug: Planted, shrink: int) -> dict[str, Any]:
    """Run the suite against a bug, and shrink some of the cases that fail."""
    source = planted(folder, bug)
    code, report, seconds = perilune(home, "traces", "run", str(suite), source=source)
    failed = [result for result in report["results"] if not result["passed"]]
    rescored, _, _ = perilune(home, "traces", "run", str(suite), "--mode", "rescore", source=source)
    cassettes = Suite(suite).cassettes
    failed.sort(key=lambda result: cassettes[result["digest"]].tokens)
    chosen = failed[len(failed) // 2 :][:shrink]
    shares = []
    for number, result in enumerate(chosen):
        small = folder / f"small-{number}"
        shutil.rmtree(small, ignore_errors=True)
        python = str(Path(sys.executable))
        options = (result["digest"], "--baseline", python, "--out", str(small))
        _, shrunk, _ = perilune(home, "traces", "shrink", str(suite), *options, source=source)
        shares.append(shrunk["mean_share_of_tokens"])
    kinds = sorted({difference["kind"] for result in failed for difference in result["differences"]})
    return {
        "bug": bug.name,
        "caught": bool(code),
        "cases that fail": len(failed),
        "caught by either half alone": all(
            any(result["held_out"] == half for result in failed) for half in (False, True)
        ),
        "caught by rescore alone": bool(rescored),
        "differences": ", ".join(kinds),
        "seconds": round(seconds, 1),
        "share of tokens after shrinking": round(shares[0], 3) if shares else None,
    }


def false_alarms(home: Path, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Replay the episodes of all runs without a bug, and sample episodes of evaluations again."""
    counts = dict.fromkeys(("harness", "rescore"), 0)
    failed, exact = 0, []
    for name in STEPS:
        perilune(home, "traces", "record", name, "--most", "300", "--out", str(folder / name))
        for mode in counts:
            _, report, _ = perilune(home, "traces", "run", str(folder / name), "--mode", mode)
            counts[mode] += report["cases"]
            failed += report["failed"]
        evaluated = str(folder / f"{name}-evaluated")
        perilune(home, "traces", "record", f"{name}/{EVALUATED}", "--most", "200", "--out", evaluated)
        options = ("--mode", "exact", "--checkpoint", f"{name}/{TRAINED}")
        _, report, seconds = perilune(home, "traces", "run", evaluated, *options)
        equal = report["cases"] - report["failed"]
        exact.append({"run": name, "episodes": report["cases"], "equal": equal, "seconds": round(seconds, 1)})
    played = sum(counts.values())
    bound = wilson_interval(failed, played).high
    return {**counts, "false alarms": failed, "upper bound of their share": round(bound, 5)}, exact


def timed(home: Path, folder: Path) -> dict[str, Any]:
    """Seconds of a command that runs a suite of sampled episodes."""
    suites = [Suite(folder / name) for name in STEPS]
    share = -(-SIZE // len(suites))
    pairs = [
        (case, suite.cassettes[case.digest])
        for suite in suites
        for case in suite.index.cases[:: max(1, len(suite.index.cases) // share)][:share]
    ][:SIZE]
    tokenizers = {item.tokenizer: suite.tokenizer(item.tokenizer) for suite in suites for item in _own(suite)}
    write_suite(folder / "timed", pairs, tokenizers, "")
    code, report, seconds = perilune(home, "traces", "run", str(folder / "timed"))
    return {"cases": report["cases"], "exit code": code, "seconds": round(seconds, 1)}


def _own(suite: Suite) -> list[Cassette]:
    return list(suite.cassettes.values())


def by_cause(home: Path, suite: Path, folder: Path) -> dict[str, Any]:
    """Shrink all cases of a suite as long as they keep the cause of their outcome."""
    _, shrunk, seconds = perilune(home, "traces", "shrink", str(suite), "--out", str(folder / "small"))
    _, again, _ = perilune(home, "traces", "run", str(folder / "small"))
    before = sum(cassette["tokens"] for cassette in shrunk["cassettes"])
    after = sum(cassette["shrunk_tokens"] for cassette in shrunk["cassettes"])
    return {
        "cases": len(shrunk["cassettes"]),
        "mean share of tokens": round(shrunk["mean_share_of_tokens"], 3),
        "share of all tokens": round(after / before, 3),
        "cases that still pass": again["cases"] - again["failed"],
        "seconds": round(seconds, 1),
    }


def main() -> None:
    """Measure everything, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shrink", type=int, default=1, help="failing cases to shrink for each bug")
    parser.add_argument("--home", type=Path, help="a home that already has the runs")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "traces.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    if unfit := misplaced_bugs(SOURCE):
        raise SystemExit("\n".join(unfit))
    with tempfile.TemporaryDirectory(prefix="perilune-traces-") as scratch:
        folder = Path(scratch)
        home = arguments.home or folder / "home"
        os.environ["PERILUNE_HOME"] = str(home)
        if arguments.home is None:
            recorded_runs(home)
        suite = make_suite(folder / "suite")
        _, clean, _ = perilune(home, "traces", "run", str(folder / "suite"))
        alarms, exact = false_alarms(home, folder)
        alarms["in the suite itself"] = clean["failed"]
        seconds = timed(home, folder)
        causes = by_cause(home, folder / "timed", folder)
        bugs = [caught(home, folder / "suite", folder, bug, arguments.shrink) for bug in PLANTED]
    result = {"suite": suite, "planted bugs": bugs, "replays without a bug": alarms}
    result |= {"exact replays": exact, "time of a suite": seconds, "shrinking by cause": causes}
    write(arguments.out, described(result) | document("traces.py", sys.argv[1:], began))


def described(found: Mapping[str, Any]) -> dict[str, Any]:
    """The result with its title, findings and introduction."""
    bugs: Sequence[Mapping[str, Any]] = found["planted bugs"]
    shares = [share for bug in bugs if (share := bug["share of tokens after shrinking"]) is not None]
    exact = found["exact replays"]
    return {
        "title": "Regression suites made of episodes",
        "about": ABOUT,
        "findings": [
            f"{sum(row['equal'] for row in exact)} of {sum(row['episodes'] for row in exact)} episodes of"
            f" {len(exact)} runs had the same tokens when they were sampled again.",
            f"`shrink` shortened one failing case of each bug to {sum(shares) / len(shares):.0%} of its "
            "tokens on average. The shortened case still gives different results with and without the bug.",
        ],
        **found,
    }


if __name__ == "__main__":
    main()
