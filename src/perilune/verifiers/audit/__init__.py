"""Audits a reward before a policy is trained on it."""

from perilune.verifiers.audit.audit import audit_reward
from perilune.verifiers.audit.findings import Audit, Example, Finding

__all__ = ["Audit", "Example", "Finding", "audit_reward"]
