"""Audit the sandbox of this machine: as it is, as an ordinary user, and without each mechanism in turn.

    python benchmarks/sandbox.py [--runs 200]

Writes results/sandbox.json.
"""

import argparse
import re
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.sandbox import WALLS, Sandbox
from perilune.sandbox.audit import SandboxAudit, audit_sandbox
from recipe_runs import HERE, document, write

WAYS: Mapping[str, tuple[str, ...]] = {
    "all mechanisms": (),
    "without namespaces": ("namespaces",),
    "without Landlock": ("landlock",),
    "without seccomp": ("seccomp",),
}
ABOUT = """\
Every probe is a program that runs inside the sandbox and tries to break out, in one or more *attempts*.

* `contained` means that every attempt failed.
* `partly` means that some attempts succeeded, and `open` that all of them did. The cell lists these attempts.

A test shows that every probe succeeds without a sandbox. The column *all mechanisms* shows the complete
sandbox. In each column *without ...*, one mechanism is switched off.

A *wall* is one promise of the sandbox. The table *Walls* lists the mechanisms that enforce each wall. One of
them is enough. Besides namespaces, Landlock and seccomp, the mechanisms are:

* `own_user` is a user id that owns nothing else.
* `landlock_scopes` is Landlock's restriction of signals.
* `counted` is the kernel's limit on the number of processes.
* `limits` are the kernel's other limits for a process.
* `watch` is the supervisor, which measures what the code uses and ends it at a limit.
* `no_new_privileges` is the kernel's flag of this name, together with the loss of all capabilities.

If a wall is missing, Perilune runs no code unless the recipe allows the missing wall. [The
explanation](../explanation/sandbox.md#what-is-not-covered) lists what the sandbox does not cover."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="runs whose time is taken")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "sandbox.json")
    arguments = parser.parse_args()
    began = time.monotonic()
    audits = {name: audit_sandbox(without=without) for name, without in WAYS.items()}
    whole = audits["all mechanisms"]
    figures = {
        "title": "What code can do in the sandbox",
        "about": ABOUT,
        "probes": {finding.probe: row(finding.probe, audits) for finding in whole.findings},
        "walls": {
            wall: {"the code": WALLS[wall][0]}
            | {name: ", ".join(audit.capabilities.walls[wall]) or "missing" for name, audit in audits.items()}
            for wall in WALLS
        },
        "CPU milliseconds per run": {
            name: milliseconds(without, arguments.runs) for name, without in WAYS.items()
        },
        "audited": dict(whole.machine),
    }
    write(arguments.out, figures | document("sandbox.py", [], began))


def row(probe: str, audits: Mapping[str, SandboxAudit]) -> dict[str, Any]:
    """The row of a probe: its attempt, its first obstacle, and its verdict in each setting."""
    findings = {
        name: next(item for item in audit.findings if item.probe == probe) for name, audit in audits.items()
    }
    first = findings["all mechanisms"]
    return {
        "probe": first.what.splitlines()[0],
        "attempts": len(first.reached) + len(first.refused),
        "wall": first.wall,
        "first error": re.sub(
            r": '.*", "", next(iter(first.refused.values()), "")
        ),  # without paths of the machine
        **{
            name: finding.verdict + (f": {', '.join(finding.reached)}" if finding.reached else "")
            for name, finding in findings.items()
        },
    }


def milliseconds(without: tuple[str, ...], runs: int) -> float:
    """CPU milliseconds of a run that prints one word, including the start of the sandbox."""
    began = spent()
    with Sandbox(without=without, allow_missing=tuple(WALLS)) as sandbox:
        for _ in range(runs):
            sandbox.run("print('word')")
    return 1000 * (spent() - began) / runs


def spent() -> float:
    """CPU seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
