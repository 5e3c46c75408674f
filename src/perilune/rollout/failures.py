"""Episodes that failed are data: counted by who failed, and by the recipe's policy a reason to stop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perilune.data.episode import Episode
from perilune.environments.core.episode_settings import EpisodeSettings
from perilune.errors import WorkFailedError

BOUNDARY = "failures/"  # before the name of a boundary, among the figures of a step
CONTAINED = "contained/"  # before what an environment had to stop, among the figures of an episode


def failure_figures(episodes: Sequence[Episode]) -> dict[str, int]:
    """How many failed, and how many of them at each boundary ("failures/environment").

    What a policy did that had to be stopped is no failure: it is counted by cause ("contained/timeout").
    """
    failed = [one.failure for one in episodes if one.failure]
    counts = Counter(failure.partition(":")[0] for failure in failed)
    contained: Counter[str] = Counter()
    for one in episodes:
        contained.update({name: int(n) for name, n in one.metrics.items() if name.startswith(CONTAINED)})
    return {
        "failures": len(failed),
        **{BOUNDARY + name: counts[name] for name in sorted(counts)},
        **dict(sorted(contained.items())),
    }


def require_few_failures(episodes: Sequence[Episode], settings: EpisodeSettings, where: str) -> None:
    """Stop where the recipe says so.

    Raises:
        WorkFailedError: when one failed and the policy is to stop, or when too many did. That all failed is
            left to who needs one that did not.
    """
    failed = Counter(one.failure for one in episodes if one.failure)
    count = failed.total()
    share = count / max(len(episodes), 1)
    stops = settings.on_failure == "stop" and count
    if not stops and (share <= settings.max_failures or count == len(episodes)):
        return
    allowed = "none is" if stops else f"{settings.max_failures:.0%} are"
    (worst, times), *_ = failed.most_common(1)
    raise WorkFailedError(
        f"{count} of {len(episodes)} episodes failed, where {allowed} allowed; {times} x {worst}",
        where=where,
        remedy="mend what failed, or allow more: environment.episodes.on_failure: drop, and max_failures",
    )
