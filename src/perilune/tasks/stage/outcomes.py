"""The outcomes of episodes: pass rates, strategies, and the summary of an evaluation with pass@k."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from perilune.data.episode import Episode
from perilune.environments.core.registry import MIXTURE
from perilune.environments.core.rewards import GOLD_METRIC
from perilune.errors import WorkFailedError
from perilune.learn.advantages import is_dead
from perilune.learn.weights import WeightedGroup, rewards
from perilune.metrics.pass_at_k import pass_at_k
from perilune.metrics.proportion import pass_rate_interval, wilson_interval
from perilune.rollout.failures import count_failures
from perilune.tasks.checks.answer_form import form_share

PASS_REWARD = 1.0  # a reward of at least this counts as a pass
MIN_TASK_SHARE = 0.9  # share of tasks with k scored answers below which pass@k is not reported
STRATEGY_PREFIX = "strategy/"


def evaluation_summary(
    environment: str, groups: Sequence[Sequence[Episode]], greedy: Sequence[Episode], seed: int
) -> dict[str, Any]:
    """Return the summary of an evaluation, without times.

    Episodes whose verifier failed count neither as right nor as wrong. Tasks without a scored answer are
    counted separately, and tasks with fewer than k scored answers are left out of pass@k.

    Args:
        groups: the sampled episodes, one group for each task.
        greedy: the episodes sampled at temperature 0; may be empty.
        seed: of the resampling for intervals.

    Raises:
        WorkFailedError: when no answer was scored.
    """
    counts = [(group[0].task_id, *_count_correct(group)) for group in groups]
    judged = [(task_id, n, c) for task_id, n, c in counts if n]
    if not judged:
        first = next(episode.failure for group in groups for episode in group if episode.failure)
        raise WorkFailedError(f"the verifier scored no answer; the first failure: {first}", where=environment)
    max_count = max(n for _, n, _ in judged)
    samples = [episode for group in groups for episode in group]
    scored_greedy = [float(is_correct(episode)) for episode in greedy if not episode.failure]
    return {
        "kind": "evaluation",
        "environment": environment,
        "tasks": len(judged),
        "samples": max_count,
        **_pass_at_k_figures([(n, c) for _, n, c in judged], seed),
        "greedy": pass_rate_interval(scored_greedy, seed=seed)._asdict() if scored_greedy else None,
        "length": {"mean": sum(episode.sampled for episode in samples) / len(samples)},
        "truncated": sum(episode.truncated for episode in samples) / len(samples),
        **({} if (share := form_share(samples)) is None else {"format": share}),
        **({"live_groups": _live_share(groups)} if max_count > 1 else {}),
        **count_failures([*samples, *greedy]),
        "tasks_without_verdict": len(counts) - len(judged),
        "by_difficulty": _by_difficulty(groups),
        **({"by_environment": parts} if (parts := _by_environment(groups, seed)) else {}),
        "strategies": strategy_figures(samples),
        "correct_per_task": judged,
    }


def environment_figures(weighted: Sequence[WeightedGroup]) -> dict[str, float]:
    """Return `environment/PART/...` for each part of a mixture: reward, pass rate, groups, and dead groups.

    Empty without a mixture. A part whose episodes all failed has no reward and no pass rate.
    """
    figures: dict[str, float] = {}
    dead = {group.episodes[0].group_id for group in weighted if group.dead}
    for part, own in groups_by_part([group.episodes for group in weighted]).items():
        rewards = [episode.reward for group in own for episode in group if episode.reward is not None]
        right = sum(is_correct(episode) for group in own for episode in group)
        means = {"reward": fmean(rewards), "pass_rate": right / len(rewards)} if rewards else {}
        share = sum(group[0].group_id in dead for group in own) / len(own)
        figures |= {
            f"environment/{part}/{name}": value
            for name, value in {**means, "groups": len(own), "dead_groups": share}.items()
        }
    return figures


def groups_by_part(groups: Sequence[Sequence[Episode]]) -> dict[str, list[Sequence[Episode]]]:
    """Return the groups of each part of a mixture by its name; empty for other environments."""
    parts: dict[str, list[Sequence[Episode]]] = defaultdict(list)
    for group in groups:
        mixture, _, part = group[0].environment.partition("/")
        if mixture == MIXTURE:
            parts[part].append(group)
    return dict(sorted(parts.items()))


def outcome_figures(episodes: Sequence[Episode], where: str) -> dict[str, Any]:
    """Return the mean reward, pass rate, failures, length and strategies of episodes.

    Raises:
        WorkFailedError: when no episode was scored.
    """
    if not episodes:
        raise WorkFailedError(
            "the policy took no turn, because its opponents ended every game first",
            where=where,
            remedy="raise prompts, or lower league.share",
        )
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    if not rewards:
        first = episodes[0].failure
        raise WorkFailedError(f"the verifier scored no episode; the first failure: {first}", where=where)
    figures: dict[str, Any] = {
        "reward": fmean(rewards),
        "pass_rate": sum(map(is_correct, episodes)) / len(rewards),
        **count_failures(episodes),
        "length": sum(episode.sampled for episode in episodes) / len(episodes),
        "truncated": sum(episode.truncated for episode in episodes) / len(episodes),
    }
    for name, strategy in strategy_figures(episodes).items():
        figures[f"strategy/{name}"] = strategy["share"]
        figures[f"accuracy/{name}"] = strategy["accuracy"]
    return figures


def strategy_figures(episodes: Sequence[Episode]) -> dict[str, dict[str, float]]:
    """Return the share and accuracy of each strategy that the environment recognized."""
    results_of: dict[str, list[bool]] = defaultdict(list)
    judged = [episode for episode in episodes if not episode.failure]
    for episode in judged:
        for name, value in episode.metrics.items():
            if name.startswith(STRATEGY_PREFIX) and value > 0:
                results_of[name.removeprefix(STRATEGY_PREFIX)].append(is_correct(episode))
    return {
        name: {"share": len(results) / len(judged), "accuracy": sum(results) / len(results)}
        for name, results in sorted(results_of.items())
    }


def _pass_at_k_figures(counts: Sequence[tuple[int, int]], seed: int) -> dict[str, dict[str, float]]:
    """Return pass@k with its interval, for each k for which enough tasks have k scored answers.

    Args:
        counts: the numbers of scored and of right answers of each task.
    """
    passes = {}
    for k in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        if values and len(values) >= MIN_TASK_SHARE * len(counts):
            passes[f"pass@{k}"] = pass_rate_interval(values, seed=seed)._asdict()
    return passes


def _by_environment(groups: Sequence[Sequence[Episode]], seed: int) -> dict[str, dict[str, Any]]:
    """Return the figures of each part of a mixture; empty for other environments."""
    figures = {}
    for part, part_groups in groups_by_part(groups).items():
        counts = [count for group in part_groups if (count := _count_correct(group))[0]]
        figures[part] = {
            "tasks": len(counts),
            **_pass_at_k_figures(counts, seed),
            "live_groups": _live_share(part_groups),
        }
    return figures


def _live_share(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Return the share of groups whose rewards differ, which reinforcement learning can learn from."""
    return wilson_interval(sum(not is_dead(rewards(group)) for group in groups), len(groups))._asdict()


def _count_correct(group: Sequence[Episode]) -> tuple[int, int]:
    """Return the numbers of scored and of right answers."""
    judged = [episode for episode in group if not episode.failure]
    return len(judged), sum(is_correct(episode) for episode in judged)


def is_correct(episode: Episode) -> bool:
    """Return whether an episode counts as right, by its gold score if it has one, else by its reward."""
    return episode.reward is not None and episode.metrics.get(GOLD_METRIC, episode.reward) >= PASS_REWARD


def _by_difficulty(groups: Sequence[Sequence[Episode]]) -> list[dict[str, float]]:
    rates: dict[float, list[float]] = defaultdict(list)
    for group in groups:
        n, c = _count_correct(group)
        if n and "difficulty" in group[0].metrics:
            rates[group[0].metrics["difficulty"]].append(c / n)
    return [
        {"difficulty": difficulty, "tasks": len(values), "pass@1": sum(values) / len(values)}
        for difficulty, values in sorted(rates.items())
    ]
