"""The reward check: a short audit of the reward before training, with a warning if it fails."""

import time

from perilune.bundle.workspace import Workspace
from perilune.environments.core.protocol import Transcript
from perilune.environments.core.registry import make_environment
from perilune.files import write_json
from perilune.verifiers import Scorer
from perilune.verifiers.audit import Audit, audit_reward
from perilune.watchdog import Watchdog

AUDIT_TASKS = 3  # the fewest tasks from which an audit draws conclusions across tasks
AUDIT_SCORINGS = 3000  # approximate number of answers that the audit scores
AUDIT_LIMIT_S = 20.0  # longest expected duration of an audit
AUDIT_FILE = "reward_audit.json"
FAILING_GRADES = frozenset({"D", "F"})


def check_reward(workspace: Workspace) -> None:
    """Audit the environment's reward and log the grade, unless an earlier attempt did or scoring is slow.

    The findings are written to `artifacts/reward_audit.json`. Only `perilune environments audit` also
    searches for exploits.
    """
    if (workspace.artifacts / AUDIT_FILE).exists():
        return
    with Watchdog("reward audit"):
        if (seconds := _seconds_to_score(workspace)) * AUDIT_SCORINGS > AUDIT_LIMIT_S:
            workspace.log(
                f"the reward was not audited, because scoring an answer takes {seconds:.2g} s;"
                " `perilune environments audit` does it"
            )
            return
        audit = audit_reward(
            workspace.job.environment, tasks=AUDIT_TASKS, search_budget=0, seed=workspace.job.seed
        )
    write_json(workspace.artifacts / AUDIT_FILE, audit.to_json())
    workspace.log(describe_audit(audit))


def _seconds_to_score(workspace: Workspace) -> float:
    """Return the seconds that it takes to score an empty answer, once the scorer's process runs.

    The result is the lowest of three measurements, because other programs only add time.
    """
    section, seed = workspace.job.environment, workspace.job.seed
    task = next(iter(make_environment(section).tasks("train", seed)))
    answers = [(task, Transcript("", True, seed=seed + number)) for number in range(AUDIT_TASKS)]
    seconds = []
    with Scorer(section) as scorer:
        scorer.score(answers[:1])
        for _ in range(3):
            start = time.perf_counter()
            scorer.score(answers)
            seconds.append(time.perf_counter() - start)
    return min(seconds) / AUDIT_TASKS


def describe_audit(audit: Audit) -> str:
    """Return the grade and the worst finding as one line for the log."""
    line = f"reward audit: grade {audit.grade}"
    if not audit.findings:
        return line
    worst = audit.findings[0]
    line += f" ({worst.probe}: {worst.what})"
    if audit.grade not in FAILING_GRADES:
        return line
    return (
        f"warning: {line}: a policy may raise this reward without solving tasks;"
        " see `perilune environments audit`"
    )
