"""The reward check: a short audit of the reward before training, with a warning if it fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perilune.files import write_json
from perilune.verifiers.audit import Audit, audit_reward
from perilune.watchdog import Waiting

if TYPE_CHECKING:
    from perilune.bundle.workspace import Workspace

TASKS = 3  # fewest tasks from which an audit draws conclusions across tasks
FILE = "reward_audit.json"
FAILING = frozenset({"D", "F"})


def check_reward(workspace: Workspace) -> None:
    """Audit the environment's reward, unless an earlier attempt did, and log the grade.

    The findings are written to `artifacts/reward_audit.json`. Only `perilune environments audit` also
    searches for exploits.
    """
    if (workspace.artifacts / FILE).exists():
        return
    with Waiting("reward audit"):
        audit = audit_reward(workspace.job.environment, tasks=TASKS, search_budget=0, seed=workspace.job.seed)
    write_json(workspace.artifacts / FILE, audit.to_json())
    workspace.log(describe_audit(audit))


def describe_audit(audit: Audit) -> str:
    """One line for the log."""
    line = f"reward audit: grade {audit.grade}"
    if not audit.findings:
        return line
    worst = audit.findings[0]
    line += f" ({worst.probe}: {worst.what})"
    if audit.grade not in FAILING:
        return line
    return (
        f"warning: {line}: a policy may raise this reward without solving tasks;"
        " see `perilune environments audit`"
    )
