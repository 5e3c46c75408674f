"""The verdict on a run: its findings, the gravest first, in one line."""

from dataclasses import asdict, dataclass
from typing import Any

from perilune.metrics.health.evidence import Evidence, Finding, Status
from perilune.metrics.health.rules import RULES

SEVERITY_ORDER: tuple[Status, ...] = ("broken", "watch", "healthy")

# By finding, the findings that it explains. A verdict leaves these out, unless they are broken.
EFFECTS_BY_CAUSE = {
    "collapse": ("dead groups", "entropy collapse"),
    "reward error": ("dead groups",),
    "reward hack": ("over-optimization",),
    "entropy collapse": ("dead groups",),
    "starvation": ("stall",),
}


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a run: `status` is that of its gravest finding."""

    status: Status
    findings: tuple[Finding, ...] = ()

    @property
    def line(self) -> str:
        """The gravest finding as one line: "watch: truncation since step 12: the token limit ..."."""
        if not self.findings:
            return self.status
        first = self.findings[0]
        since = "" if first.since is None else f" since step {first.since}"
        return f"{self.status}: {first.name}{since}: {first.why}"

    def document(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "line": self.line,
            "findings": [asdict(finding) for finding in self.findings],
        }


def assess_health(run: Evidence) -> Health:
    """Return the health of a run from its lines. Pure: the same lines and times give the same verdict."""
    findings = [finding for rule in RULES for finding in rule(run)]
    effects = {effect for finding in findings for effect in EFFECTS_BY_CAUSE.get(finding.name, ())}
    findings = [finding for finding in findings if finding.name not in effects or finding.status == "broken"]
    findings.sort(key=lambda finding: SEVERITY_ORDER.index(finding.status))
    return Health(findings[0].status if findings else "healthy", tuple(findings))
