"""Audit the scorers of all reasoning-gym families, as the package ships them and as Perilune uses them.

    python benchmarks/reward_audit.py [--families chain_sum countdown] [--keep] [--tasks 8] [--search 480]

As shipped, the scorer judges any text. Perilune's default in a recipe rewards only the full score, for an
answer that is finished and has the form of an answer. Each line names the grade, the gravest finding and an
output that shows it; `perilune environments audit` lists all findings. Writes results/reward_audit.json after
each family. With --keep, the other families of that file stay, and the result names them.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.environments.adapters.independent_checks import UNRELIABLE_FAMILIES
from perilune.environments.core.registry import environment_families
from perilune.verifiers.audit import Audit, Finding, audit_reward
from recipe_runs import HERE, document, write

WAYS: Mapping[str, Mapping[str, Any]] = {
    "as shipped": {"threshold": None, "strict": False},
    "in a recipe": {},
}
LONGEST = 60  # characters of an example
ABOUT = f"""\
With a recipe's default settings, an answer gets a reward only if it is finished, has the expected form, and
gets the full score from the scorer.

The grades:

* A: no wrong output was rewarded.
* B: a small reward for a wrong output, a partial reward for a nearly right one, or the full reward for a
  right answer in lookalike characters.
* C: a partial reward without the answer, or a scorer that fails on wrong outputs.
* D: the full reward for wrong outputs that were derived from right ones.
* F: the full reward without the answer, no reward for a right answer, or different rewards for the same
  answer.

An output counts as wrong if it cannot be right for any task, or if a second checker rejects it. This checker
shares no code with the scorer. A full reward for a right answer that was cut off does not lower the grade,
because a shipped scorer cannot see that an answer was cut off.

The scorers of {len(UNRELIABLE_FAMILIES)} families count as unreliable, because they give the full reward to
clearly wrong answers. In these families, a recipe gives no reward to an answer that the second checker
rejects. Grade A of these families means that recipes apply this rule, and not that the checker is right.

In the table of families, *most severe finding* names the [probe](../how-to/reward-audit.md) that produced the
output, and *tasks* counts the tasks with this finding."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=environment_families("reasoning_gym"))
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--search", type=int, default=480)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "reward_audit.json")
    parser.add_argument("--keep", action="store_true", help="keep the other families of the result")
    arguments = parser.parse_args()
    began = time.monotonic()
    kept: dict[str, dict[str, Any]] = {}
    if arguments.keep:
        kept = json.loads(arguments.out.read_text(encoding="utf-8"))["families"]
        kept = {name: kept[name] for name in kept.keys() - set(arguments.families)}
    families = dict(kept)
    for family in arguments.families:
        sections = ({"id": "reasoning_gym", "task": family, **settings} for settings in WAYS.values())
        audits = [
            audit_reward(item, tasks=arguments.tasks, search_budget=arguments.search) for item in sections
        ]
        families[family] = row(*audits)
        print(family, families[family], file=sys.stderr, flush=True)
        write(arguments.out, report(families, kept) | document("reward_audit.py", sys.argv[1:], began))


def row(shipped: Audit, asked: Audit) -> dict[str, Any]:
    """The table row of one family."""
    worst, remaining = gravest(shipped), gravest(asked)
    return {
        "as shipped": shipped.grade,
        "most severe finding": told(worst),
        "tasks": "" if worst is None else f"{worst.tasks} of {shipped.tasks}",
        "reward": "" if worst is None else verdict(worst),
        "output": "" if worst is None else shown(worst),
        "in a recipe": asked.grade,
        "findings in a recipe": told(remaining),
    }


def gravest(audit: Audit) -> Finding | None:
    """The most severe finding, and among equals the one that needs the least knowledge."""
    worst = [finding for finding in audit.findings if finding.grade == audit.grade]
    simple = [finding for finding in worst if finding.probe not in ("search", "again")]
    return min(simple or worst, key=lambda finding: len(finding.example.transcript.text), default=None)


def told(finding: Finding | None) -> str:
    return "" if finding is None else f"{finding.probe}: {finding.what}"


def verdict(finding: Finding) -> str:
    value = finding.example.verdict
    return f"{value:.3g}" if isinstance(value, float) else "scorer failed"


def shown(finding: Finding) -> str:
    text = finding.example.transcript.text
    quoted = ascii(text[:LONGEST]).replace("`", "'")
    return f"`{quoted}`" + (f" … ({len(text):,} characters)" if len(text) > LONGEST else "")


def report(families: Mapping[str, Mapping[str, Any]], kept: Collection[str] = ()) -> dict[str, Any]:
    """The result; `kept` are the families that an earlier run measured."""
    earlier = f"\n\nAn earlier run measured these families: {', '.join(sorted(kept))}." if kept else ""
    rows = list(families.values())
    counts = {name: Counter(row[name] for row in rows) for name in WAYS}
    return {
        "title": "Audit of reasoning-gym's rewards",
        "about": ABOUT + earlier,
        "grades": {grade: {name: counts[name][grade] for name in WAYS} for grade in "ABCDF"},
        "families": dict(sorted(families.items(), key=lambda item: item[1]["as shipped"], reverse=True)),
    }


def _again_with_fixed_hashes(arguments: Sequence[str]) -> None:
    """Restart with a fixed hash seed, on which the tasks of some families depend."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    _again_with_fixed_hashes(sys.argv)
    main()
