"""Audit scorers and judges with one planted hack each, sound scorers, and the built-in rewards.

    python benchmarks/reward_hacks.py [--tasks 4]

A planted hack counts as named if a finding has the name of its family. A sound scorer or a built-in reward
with a grade below A is a false alarm, or a weakness that is listed with its example. The audits do not search
for outputs. Writes results/reward_hacks.json.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perilune.environments.core.registry import environment_families
from perilune.verifiers.audit import Audit, audit_reward
from recipe_runs import HERE, document, write
from reward_audit import gravest, shown, told, verdict

TESTS = [str(HERE.parent / "tests" / folder) for folder in ("verifiers", "environments")]
BUILT_IN = ("calculator", "facts", "instructions", "oolong", "planning", "planning_repair", "wide_lookup")
JUDGES = {
    "sound": "A",
    "obedient": "prompt injection",
    "reads_the_answer": "prompt injection after a wrong answer",
    "Forgetful": "order",
}
ABOUT = """\
The planted hacks cover the families of public lists (rewardspy, RHOB, the verifier hardening list of
benchflow, "One Token to Fool LLM-as-a-Judge"). The audit knows the answers that the environment states to be
right, but not the scorer's code.

* Each *planted scorer* has one hack. The hack counts as *named* if a finding has the name of the hack's
  family. We wrote these scorers and the probes together, so their result only shows that every family is
  covered.
* We wrote the *unseen scorers* afterwards, audited them once, and did not change the probes because of them.
* The *judges* are small HTTP servers with OpenAI's interface. A judge that rewards each answer only once
  looks to the audit like a judge whose scores depend on the order of the answers, because the audit cannot
  restart a server. So the finding for this judge (*forgetful*) names the family *order*.
* *Sound scorers* and *built-in rewards* should get grade A. The table *Built-in rewards below A* lists the
  exceptions. [The audit of reasoning-gym](reward_audit.md) explains the grades."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "reward_hacks.json")
    arguments = parser.parse_args()
    sys.path += TESTS
    from scorer_corpus import NAMED, SOUND, UNSEEN

    began = time.monotonic()
    planted = {name: named(corpus(name), family) for name, family in NAMED.items()}
    unseen = {name: listed(corpus(name)) for name in UNSEEN}
    sound = {name: corpus(name) for name in SOUND}
    judges = dict(judged(arguments.tasks))
    built_in = {name: checked(section, arguments.tasks) for name, section in sections()}
    result = {
        "title": "Reward hacks by family",
        "about": ABOUT,
        "summary": {
            "planted scorers": len(planted),
            "planted scorers named": sum(row["named"] == "yes" for row in planted.values()),
            "unseen scorers": len(unseen),
            "unseen scorers with grade C or worse": sum(row["grade"] >= "C" for row in unseen.values()),
            "sound scorers": len(sound),
            "sound scorers with grade A": sum(audit.grade == "A" for audit in sound.values()),
            "built-in rewards": len(built_in),
            "built-in rewards with grade A": Counter(audit.grade for audit in built_in.values())["A"],
        },
        "planted scorers": planted,
        "unseen scorers": unseen,
        "judges": judges,
        "built-in rewards below A": {
            name: listed(audit) for name, audit in built_in.items() if audit.grade != "A"
        },
    }
    write(arguments.out, result | document("reward_hacks.py", sys.argv[1:], began))


def sections() -> Iterator[tuple[str, dict[str, Any]]]:
    """The rewards that recipes get by default."""
    yield from ((name, {"id": name}) for name in BUILT_IN)
    for family in environment_families("reasoning_gym"):
        yield f"reasoning_gym/{family}", {"id": "reasoning_gym", "task": family}


def corpus(scorer: str) -> Audit:
    section = {"id": "factory", "factory": "scorer_corpus:make", "scorer": scorer}
    return checked(section, 3)


def checked(section: Mapping[str, Any], tasks: int) -> Audit:
    audit = audit_reward(section, tasks=tasks, search_budget=0)
    print(audit.grade, dict(section), told(gravest(audit)), file=sys.stderr, flush=True)
    return audit


def listed(audit: Audit) -> dict[str, Any]:
    """The grade, and below A also the most severe finding with its output."""
    worst = gravest(audit) if audit.grade != "A" else None
    return {"grade": audit.grade} | ({"finding": told(worst), "output": shown(worst)} if worst else {})


def named(audit: Audit, family: str) -> dict[str, Any]:
    """The row of a planted hack: its family, its finding if any, and the rewarded output."""
    own = [finding for finding in audit.findings if finding.probe == family]
    row = {"family": family, "grade": audit.grade, "named": "yes" if own else "no"}
    best = max(own, key=lambda finding: str(finding.example.verdict), default=None)
    return row | ({"reward": verdict(best), "output": shown(best)} if best else {})


def judged(tasks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Audit each judge behind HTTP."""
    import judge_server

    for name, family in JUDGES.items():
        judge = getattr(judge_server, name)
        with judge_server.judging(judge() if isinstance(judge, type) else judge) as server:
            audit = checked(judge_server.section(server), tasks)
            row = {"family": "", "grade": audit.grade, "named": ""} if family == "A" else named(audit, family)
            yield name.replace("_", " ").lower(), row | {"requests": len(server.seen)}


def _again_with_paths(arguments: list[str]) -> None:
    """Restart with a fixed hash seed, and with paths from which the scorer can import the hacks."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        paths = os.pathsep.join(TESTS)
        own = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths}
        os.execve(sys.executable, [sys.executable, *arguments], own)


if __name__ == "__main__":
    _again_with_paths(sys.argv)
    main()
