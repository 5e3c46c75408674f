"""Counts failed episodes by boundary, and raises an error when more fail than the recipe allows."""

from collections import Counter
from collections.abc import Sequence

from perilune.data.episode import Episode
from perilune.environments.core.episode_settings import EpisodeSettings
from perilune.errors import WorkFailedError

BOUNDARY_PREFIX = "failures/"  # of a step's metrics that count failures by boundary
CONTAINED_PREFIX = "contained/"  # of an episode's metrics that count stopped actions by cause


def count_failures(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return the number of failures, in all and by boundary ("failures/environment").

    An action of the policy that the environment stopped is not a failure. It is counted by cause
    ("contained/timeout").
    """
    failed = [episode.failure for episode in episodes if episode.failure]
    counts = Counter(failure.partition(":")[0] for failure in failed)
    contained: Counter[str] = Counter()
    for episode in episodes:
        contained.update(
            {name: int(n) for name, n in episode.metrics.items() if name.startswith(CONTAINED_PREFIX)}
        )
    return {
        "failures": len(failed),
        **{BOUNDARY_PREFIX + name: counts[name] for name in sorted(counts)},
        **dict(sorted(contained.items())),
    }


def check_failure_limit(episodes: Sequence[Episode], settings: EpisodeSettings, where: str) -> None:
    """Enforce `on_failure` and `max_failures`.

    Raises:
        WorkFailedError: when more episodes failed than allowed. With `on_failure: drop`, there is no error if
            all episodes failed, because the caller then reports that nothing was scored.
    """
    failed = Counter(episode.failure for episode in episodes if episode.failure)
    count = failed.total()
    share = count / max(len(episodes), 1)
    stops = settings.on_failure == "stop" and count
    if not stops and (share <= settings.max_failures or count == len(episodes)):
        return
    allowed = "none are" if stops else f"{settings.max_failures:.0%} are"
    (worst, times), *_ = failed.most_common(1)
    raise WorkFailedError(
        f"{count} of {len(episodes)} episodes failed, and {allowed} allowed; {times} x {worst}",
        where=where,
        remedy="fix the cause, or allow more failures with environment.episodes.on_failure: drop and"
        " max_failures",
    )
