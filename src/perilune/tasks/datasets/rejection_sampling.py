"""The work of rejection_sampling: a checkpoint samples traces, and the right ones are kept.

With a system message this is off-policy context distillation. The sampling policy then knows more than the
policy that will be trained, so answers that reveal the message, or are implausible without it, are rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.leaks import leak
from perilune.data.records import TraceRecord, write_records
from perilune.errors import WorkFailedError
from perilune.files import write_json_lines
from perilune.rollout.timing import Stopwatch
from perilune.tasks.datasets.own_traces import likeliest, own_record, sampled_by
from perilune.tasks.datasets.specs import RejectionSamplingSpec
from perilune.tasks.stage.outcomes import passed
from perilune.tasks.stage.player import Player, open_player, outcome_figures
from perilune.tasks.stage.system_prompt import hinted

OUTPUT = "artifacts/traces"


def run(workspace: Workspace, spec: RejectionSamplingSpec) -> dict[str, Any]:
    """Sample with and without the system message, and keep right answers that do not need it."""
    workspace.rewind(-1)  # removes the figures of an earlier attempt
    watch = Stopwatch()
    answers = spec.tasks * spec.samples
    rounds = 2 if spec.system else 1
    with open_player(workspace, spec.max_tokens) as player:
        tasks = player.training_tasks().take(spec.tasks)
        played = []
        for done, asked in enumerate((hinted(tasks, spec.system), tasks)[:rounds]):
            played.append(
                player.play(
                    asked, samples=spec.samples, temperature=spec.temperature, step=done, watch=watch,
                    done=done * answers, total=rounds * answers,
                )
            )  # fmt: skip
        groups = played[0]
        reasons = _reasons(groups, spec, player)
    provenance = sampled_by(workspace.job)
    kept: list[TraceRecord] = []
    refused: list[dict[str, Any]] = []
    for group in groups:
        right = [one for one in group if reasons[one.episode_id] is None]
        refused += [_refused(one, reason) for one in group if (reason := reasons[one.episode_id])]
        if (best := likeliest(right)) is not None:
            kept.append(own_record(best, provenance, spec.system))
    output = workspace.root / OUTPUT
    write_json_lines(output / "rejected.jsonl", refused)
    episodes = [one for group in groups for one in group]
    figures = outcome_figures(episodes, f"stage {workspace.job.stage}")
    kinds = Counter(reason.partition(":")[0] for reason in reasons.values() if reason)
    judged_right = sum(kinds[name] for name in ("leak", "implausible")) + sum(
        reason is None for reason in reasons.values()
    )
    told: dict[str, Any] = {
        "rows": len(kept),
        "rejected": len(refused),
        "accept_rate": sum(reason is None for reason in reasons.values()) / answers,
        "pass_rate": figures["pass_rate"],
        "leak_rate": kinds["leak"] / max(judged_right, 1),
        "implausible_rate": kinds["implausible"] / max(judged_right, 1),
    }
    if spec.system:
        without = [one for group in played[1] for one in group]
        told["unhinted_pass_rate"] = outcome_figures(without, "without system")["pass_rate"]
    workspace.metric(0, **told)
    workspace.timing(0, **watch.figures())
    if not kept:
        raise WorkFailedError(
            f"none of {answers:,} answers was kept ({dict(kinds)})",
            where=f"stage {workspace.job.stage}",
            remedy=f"look at {OUTPUT}/rejected.jsonl in the run's directory",
        )
    write_records(output / "records.jsonl", kept)
    workspace.progress(rounds * answers, rounds * answers, "answers", kept=len(kept))
    return {
        "kind": "dataset",
        **told,
        "reasons": dict(kinds),
        "sources": {kept[0].source: len(kept)},
        "environment": player.environment.id,
        "seconds": watch.elapsed,
    }


def _reasons(
    groups: Sequence[Sequence[Episode]], spec: RejectionSamplingSpec, player: Player
) -> dict[str, str | None]:
    """Why each answer is refused, by episode_id; None for one that is not.

    Leaks and implausible answers are counted among the right ones only.
    """

    found: dict[str, str | None] = {}
    right: list[Episode] = []
    for one in (one for group in groups for one in group):
        if one.failure:
            found[one.episode_id] = f"failure: {one.failure}"
        elif not passed(one):
            found[one.episode_id] = f"wrong: score {one.reward:g}"
        elif one.truncated:
            found[one.episode_id] = "truncated: cut off"
        else:
            found[one.episode_id] = None
            right.append(one)
    prompts = [one.opening[1 if spec.system else 0 :] for one in right]
    for one in right:
        asked, text = (_said(one, spec.system, by_policy=own) for own in (False, True))
        if spec.system and (said := leak(text, spec.system, asked, ngram=spec.ngram, phrases=spec.phrases)):
            found[one.episode_id] = f"leak: {said}"
    if spec.min_logprob is not None:
        ids = player.policy.tokenizer.encode_prompts(prompts)
        scores = player.engine.score(ids, [one.token_ids.tolist() for one in right], spec.temperature)
        for one, logprobs in zip(right, scores, strict=True):
            lowest = float(logprobs[one.loss_mask].min())
            if found[one.episode_id] is None and lowest < spec.min_logprob:
                found[one.episode_id] = (
                    f"implausible: a token at {lowest:.2f} nats without the system message"
                )
    return found


def _said(episode: Episode, system: str, *, by_policy: bool) -> str:
    """What the policy said, or what it was told but for the system message."""
    told = episode.messages[1 if system else 0 :]
    return "".join(one["content"] for one in told if (one["role"] == "assistant") == by_policy)


def _refused(episode: Episode, reason: str) -> dict[str, Any]:
    return {"task_id": episode.task_id, "source": "sampled", "text": episode.text, "reason": reason}
