"""The work of a stage, counted before it runs: tokens that are sampled and trained on, episodes, steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perilune.environments.core.registry import make_environment

if TYPE_CHECKING:
    from perilune.bundle.job import Job
    from perilune.plan.trial import Lengths

BLOCK_TOKENS = 16  # tokens in a block of the engine's cache
SLOTS = 256  # episodes that the engine samples at once

Work = dict[str, float]
"""Amounts of work: `decode` steps and the tokens `sampled` in them, `update`s and the tokens
`learned` in them, the same of RL (`reinforce`, `reinforced`), tokens of `forward` passes alone, sampled
`turn`s, `episode`s, `task`s, `trace`s, `row`s of data, `step`s of RL, and starts of a `scorer`."""


def count_work(job: Job, lengths: Lengths, *, live: float = 1.0, rows: float = 0.0) -> Work | None:
    """Count the work of a stage without its start; None for tasks that are not counted.

    Args:
        lengths: of its episodes, or of the rows that it trains on.
        live: share of the sampled groups that have a gradient.
    """
    spec = job.spec
    match job.task:
        case "collect":
            return {"trace": spec["traces"], "scorer": 1}
        case "rl" if spec.get("asynchronous"):
            return None  # sampling and learning overlap
        case "rl" | "selfplay" | "distill":
            work = _count_rl(job, lengths, live)
        case "sft" | "preference" | "reward_model":
            answers = 1 if job.task == "sft" else 2  # a pair has two
            row = lengths.prompt * lengths.distinct + lengths.fed * answers
            reference = rows * row if job.task == "preference" else 0.0
            work = _count_training(spec["steps"], spec["steps"] * spec["batch_size"] * row)
            work |= {"row": rows, "forward": reference}
        case "evaluate":
            greedy = _count_sampling(lengths, spec["tasks"], 1)
            work = _add(_count_sampling(lengths, spec["tasks"], spec["samples"]), greedy)
        case "rejection_sampling" | "pairs":
            work = _count_sampling(lengths, spec["tasks"], spec["samples"])
        case "flywheel":
            sampled = _count_sampling(lengths, spec["tasks"], spec["samples"])
            judged = _count_sampling(lengths, 4 * spec["heldout"], 1)
            row = lengths.prompt * lengths.distinct + lengths.fed
            learned = spec["updates"] * spec["batch_size"] * row
            work = _multiply(spec["steps"], _add(sampled, judged, _count_training(spec["updates"], learned)))
        case _:
            return None
    return _add(work, _count_evaluations(job, lengths), {"scorer": 1} if "samples" in spec else {})


def _count_rl(job: Job, lengths: Lengths, live: float) -> Work:
    spec = job.spec
    players = getattr(make_environment(job.environment), "players", 1)
    episodes = spec["prompts"] * spec["samples"] * players
    fed = spec["prompts"] * lengths.prompt + episodes * lengths.fed
    passes = spec.get("epochs_per_batch", 1)
    step = _add(
        _count_sampling(lengths, spec["prompts"], spec["samples"], players),
        {"reinforce": passes * spec.get("updates_per_batch", 1), "reinforced": passes * live * fed},
        {"step": 1, "forward": fed if job.task == "distill" or spec.get("kl") else 0.0},
    )
    league = _count_league(spec, lengths, players) if "league" in spec else {}
    return _add(_multiply(spec["steps"], step), league)


def _count_league(spec: Mapping[str, Any], lengths: Lengths, players: int) -> Work:
    """Count the matches of each new member: against named players, the first member and the champion."""
    league = spec["league"]
    named = _count_sampling(lengths, league["games"] * len(league["against"]), 1)
    members = _count_sampling(lengths, 2 * league["games"], 1, players)
    return _multiply(1 + -(-spec["steps"] // league["every"]), _add(named, members))


def _count_evaluations(job: Job, lengths: Lengths) -> Work:
    if not job.spec.get("eval"):
        return {}
    from perilune.tasks.stage.evaluation_settings import EvaluationSettings

    settings = EvaluationSettings.model_validate(job.spec["eval"])
    rounds = len(settings.steps(job.spec["steps"])) * len(settings.sections(job.environment))
    return _multiply(rounds, _count_sampling(lengths, settings.tasks, settings.samples))


def _count_sampling(lengths: Lengths, tasks: int, samples: int, players: int = 1) -> Work:
    """Count sampling and scoring. Episodes advance together, so the longest decides the decode steps."""
    games = tasks * samples
    episodes = games * players
    waiting = max(0, episodes - SLOTS) * lengths.sampled / SLOTS
    # The prefix cache has whole blocks, so each further turn computes the rest of a block again.
    observed = lengths.fed - lengths.sampled + (lengths.turns - 1) * BLOCK_TOKENS
    return {
        "decode": players * lengths.longest + waiting,
        "sampled": episodes * lengths.sampled,
        "forward": tasks * players * lengths.prompt + episodes * observed,
        "turn": episodes * lengths.turns,
        "episode": games,
        "task": tasks,
    }


def _count_training(updates: float, tokens: float) -> Work:
    return {"update": updates, "learned": tokens}


def _multiply(count: int, work: Work) -> Work:
    return {name: count * amount for name, amount in work.items()}


def _add(*parts: Work) -> Work:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}
