"""The health of an attempt, from its files alone. The attempt may be running, finished or dead."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perilune.metrics.health.evidence import Evidence, Finding
from perilune.metrics.health.series import Series
from perilune.metrics.health.verdict import Health, assess_health
from perilune.metrics.rounding import ROUNDING
from perilune.ui.attempt import Attempt
from perilune.ui.view import StageView

MAX_JUDGED_STEPS = 1500  # latest steps to judge; an older finding is dated to the first of them


@dataclass(frozen=True, slots=True)
class StageHealth:
    """The verdict on one stage."""

    stage: str
    state: str
    status: str
    steps: int
    findings: tuple[Finding, ...]


def assess_stages(pairs: Sequence[tuple[StageView, Attempt]], now: float | None = None) -> list[StageHealth]:
    """Return the verdicts on the stages that train, run or failed."""
    verdicts = []
    for stage, attempt in pairs:
        health = assess_attempt(attempt, here=stage.here, now=now)
        findings = tuple(
            replace(item, remedy=item.remedy.replace("RUN", stage.run_id)) for item in health.findings
        )
        if stage.state == "failed":
            findings = (describe_failure(attempt, stage.run_id, stage.cause), *findings)
        steps = sum(bool(line.get("step")) for line in attempt.metric_lines)
        if findings or stage.state == "active" or "steps" in attempt.spec:
            status = findings[0].status if findings else health.status
            verdicts.append(StageHealth(stage.name, stage.state, status, steps, findings))
    return verdicts


def describe_failure(attempt: Attempt, run_id: str, cause: str) -> Finding:
    """Return the failure of a run as a finding."""
    message = str(attempt.verdict.get("message") or cause or "the task failed")
    why, _, advice = (part.strip() for part in message.partition("\n"))
    remedy = advice.removeprefix("try: ") or f"perilune explain {run_id}"
    return Finding("failed", "broken", None, why, remedy)


def assess_attempt(attempt: Attempt, *, here: bool = True, now: float | None = None) -> Health:
    """Return the verdict on the latest steps of an attempt; healthy if it has not written a step.

    Args:
        here: whether the attempt is on this machine. If not, the age of its files is not judged.
        now: seconds since the epoch.
    """
    spec = attempt.spec
    clock = time.time() if now is None else now
    device = "cuda" if (attempt.precheck.get("torch") or {}).get("cuda") else "cpu"
    precision = "bfloat16" if spec.get("precision") == "bfloat16" else "float32"
    live = attempt.root is not None and not attempt.verdict and attempt.began is not None

    def age(name: str) -> float | None:
        written = attempt.modified(name) if live and here else None
        return None if written is None else max(0.0, clock - written)

    return assess_health(
        Evidence(
            metrics=Series(attempt.metric_lines[-MAX_JUDGED_STEPS:]),
            timings=Series(attempt.timing_lines[-MAX_JUDGED_STEPS:]),
            samples=int(spec.get("samples") or 1),
            max_staleness=_max_staleness(spec),
            rounding=ROUNDING[precision, device],
            open_seconds=age("artifacts/timings.jsonl"),
            silent_seconds=age("runtime/heartbeat.json"),
        )
    )


def _max_staleness(spec: Mapping[str, Any]) -> float | None:
    """Return the bound on the age of a token in updates, if the stage has one."""
    explicit = (spec.get("off_policy") or {}).get("max_staleness")
    if explicit is not None:
        return float(explicit)
    ahead = (spec.get("asynchronous") or {}).get("staleness")
    updates = int(spec.get("updates_per_batch") or 1) * int(spec.get("epochs_per_batch") or 1)
    return None if ahead is None else 4.0 * (ahead + 1) * updates
