"""Warns when almost no answer has the form that the environment scores, so there is nothing to learn from.

A pretrained model that is not told in which form to answer, or does not know the form, always gets the score
0. The share of answers with the form comes from the reward term `format` (of the `prompting` section), or
else from the environment's own term `well_formed`.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from perilune.bundle.job import Job
from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.environments.core import prompting
from perilune.environments.core.prompted_environment import FORMAT_TERM
from perilune.metrics.learnability import MAX_TRUNCATED_SHARE

FORM_TERMS = (FORMAT_TERM, "well_formed")
MAX_RARE_SHARE = 0.05  # share of answers below which the form counts as unknown to the model
JUDGED_STEPS = 3  # RL steps after which the share is judged


def form_share(episodes: Sequence[Episode]) -> float | None:
    """Return the share of scored answers with the form; None if no reward term measures it."""
    for name in FORM_TERMS:
        if values := [episode.reward_terms[name] for episode in episodes if name in episode.reward_terms]:
            return fmean(values)
    return None


def rare_form_warning(share: float | None, truncated: float, job: Job) -> str:
    """Return the warning about `share`, with what to set; empty if the share is unknown or large enough.

    Args:
        truncated: share of answers that the token limit cut off.
    """
    if share is None or share >= MAX_RARE_SHARE:
        return ""
    settings = job.environment.get(prompting.PROMPTING_KEY) or {}
    is_fresh = bool(job.model.get("preset"))  # a model with random weights cannot be asked for a form
    remedies = []
    if truncated > MAX_TRUNCATED_SHARE:
        remedies.append(f"raise max_tokens, which cut off {truncated:.0%} of answers")
    if not is_fresh and not settings.get("format"):
        remedies.append("set environment.prompting.format, so that the model is told how to answer")
    if not is_fresh and not settings.get("few_shot"):
        remedies.append("set environment.prompting.few_shot, so that it sees examples")
    remedies.append("train it on such answers in an sft stage first")
    return f"only {share:.1%} of answers have the form that is scored. Remedies: {'; '.join(remedies)}"


class FormWatch:
    """Checks the share of answers with the form in the first `JUDGED_STEPS` steps of a run.

    Attributes:
        warning: the warning; empty before it is known, or if there is none.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.warning = ""
        self._workspace = workspace
        self._shares: list[float] = []
        self._truncated: list[float] = []

    def observe(self, line: Mapping[str, Any]) -> str:
        """Add the metrics of a step; return the warning after the last of the checked steps, else ""."""
        share = next((line[key] for name in FORM_TERMS if (key := f"term/{name}") in line), None)
        if share is None or len(self._shares) == JUDGED_STEPS:
            return ""
        self._shares.append(share)
        self._truncated.append(line["truncated"])
        if len(self._shares) < JUDGED_STEPS:
            return ""
        mean = math.fsum(self._shares) / JUDGED_STEPS
        truncated = math.fsum(self._truncated) / JUDGED_STEPS
        self.warning = rare_form_warning(mean, truncated, self._workspace.job)
        return self.warning
