"""Audit the scorers of all reasoning-gym families: as the package ships them, and as Perilune asks them.

    python benchmarks/reward_audit.py [--families chain_sum countdown] [--tasks 8] [--search 480]

As shipped is the scorer's own figure for any text; as Perilune asks is the default of a recipe, where an
answer must be finished and have the form of one, and is paid from the full score on. Each line names the
grade, the gravest finding and an output that shows it; `perilune environments audit` gives all of them.
Writes results/reward_audit.json after each family; families that are not asked for stay as they were.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.environments.adapters.independent_checks import DOUBTED
from perilune.environments.core.registry import environment_families
from perilune.verifiers.audit import Audit, Finding, audit_reward
from recipe_runs import HERE, document, write

WAYS: Mapping[str, Mapping[str, Any]] = {
    "as shipped": {"threshold": None, "strict": False},
    "as Perilune asks": {},
}
LONGEST = 60  # characters of an example
ABOUT = (
    "Every family of reasoning-gym, its reward audited twice: as the package ships the scorer, and as a "
    "recipe asks it by default: an answer must be finished and have the form of one, and is paid from the "
    "full score on. Grades: A paid no wrong output; B pays a little for nothing or in part for the nearly "
    "right; C pays in part without the answer, or gives wrong outputs no verdict; D pays in full for wrong "
    "outputs made from right ones; F pays in full without the answer, refuses right answers, or changes "
    "its verdict. An output is wrong when it is so for any task, or when a second opinion that shares no "
    "code with the scorer says so. "
    f"In {len(DOUBTED)} families that the audit found paying in full for wrong answers, a recipe now pays "
    "nothing for what the second opinion rejects: their A says that this is kept, not that the opinion is "
    "right."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=environment_families("reasoning_gym"))
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--search", type=int, default=480)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "reward_audit.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    families: dict[str, dict[str, Any]] = {}
    if arguments.out.exists():
        earlier = json.loads(arguments.out.read_text(encoding="utf-8"))
        families, began = earlier["families"], began - 60 * earlier["minutes"]
    for family in arguments.families:
        sections = ({"id": "reasoning_gym", "task": family, **settings} for settings in WAYS.values())
        audits = [
            audit_reward(one, tasks=arguments.tasks, search_budget=arguments.search) for one in sections
        ]
        families[family] = row(*audits)
        print(family, families[family], file=sys.stderr, flush=True)
        write(arguments.out, report(families) | document("reward_audit.py", [], began))


def row(shipped: Audit, asked: Audit) -> dict[str, Any]:
    """One family's line."""
    worst, left = gravest(shipped), gravest(asked)
    return {
        "as shipped": shipped.grade,
        "gravest finding": told(worst),
        "on": "" if worst is None else f"{worst.tasks} of {shipped.tasks}",
        "paid": "" if worst is None else verdict(worst),
        "for": "" if worst is None else shown(worst),
        "as Perilune asks": asked.grade,
        "what is left": told(left),
    }


def gravest(audit: Audit) -> Finding | None:
    """The finding of the worst grade that needs the least knowledge."""
    worst = [finding for finding in audit.findings if finding.grade == audit.grade]
    simple = [finding for finding in worst if finding.probe not in ("search", "again")]
    return min(simple or worst, key=lambda finding: len(finding.example.transcript.text), default=None)


def told(finding: Finding | None) -> str:
    return "" if finding is None else f"{finding.probe}: {finding.what}"


def verdict(finding: Finding) -> str:
    found = finding.example.verdict
    return f"{found:.3g}" if isinstance(found, float) else "no verdict"


def shown(finding: Finding) -> str:
    text = finding.example.transcript.text
    quoted = ascii(text[:LONGEST]).replace("`", "'")
    return f"`{quoted}`" + (f" … ({len(text):,} characters)" if len(text) > LONGEST else "")


def report(families: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    rows = list(families.values())
    counts = {name: Counter(row[name] for row in rows) for name in WAYS}
    return {
        "title": "What reasoning-gym's rewards pay for",
        "about": ABOUT,
        "grades": {grade: {name: counts[name][grade] for name in WAYS} for grade in "ABCDF"},
        "families": dict(sorted(families.items(), key=lambda item: item[1]["as shipped"], reverse=True)),
    }


def _again_with_fixed_hashes(arguments: Sequence[str]) -> None:
    """Some families' tasks follow Python's hash seed."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    _again_with_fixed_hashes(sys.argv)
    main()
