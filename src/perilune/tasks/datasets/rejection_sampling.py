"""The work of rejection_sampling: a checkpoint samples traces, and the right ones are kept.

With a system message this is off-policy context distillation. The sampling policy then has more information
than the policy that will be trained, so answers that reveal the message, or are implausible without it, are
rejected.
"""

from collections import Counter
from typing import Any

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.data.leaks import find_leak
from perilune.data.records import write_records
from perilune.errors import WorkFailedError
from perilune.files import write_json_lines
from perilune.rollout.groups import Groups, flatten
from perilune.rollout.timing import Stopwatch
from perilune.tasks.datasets.own_traces import most_likely, reason_to_reject, sampling_provenance, to_record
from perilune.tasks.datasets.stages import RejectionSamplingSpec
from perilune.tasks.stage.memory_plan import sampling_plan
from perilune.tasks.stage.outcomes import outcome_figures
from perilune.tasks.stage.player import Player, open_player
from perilune.tasks.stage.system_message import add_system_message

OUTPUT = "artifacts/traces"
LEAKED, IMPLAUSIBLE = "leak", "implausible"  # kinds of reasons to reject a right answer


def run(workspace: Workspace, spec: RejectionSamplingSpec) -> dict[str, Any]:
    """Sample with and without the system message, and keep right answers that do not depend on it."""
    workspace.rewind(-1)  # removes the metrics of an earlier attempt
    watch = Stopwatch()
    answers = spec.tasks * spec.samples
    with open_player(workspace, spec.max_tokens, memory=sampling_plan(answers)) as player:
        groups, *without_system = _sample(spec, player, watch)
        reasons = _reasons_to_reject(groups, spec, player)
    kept, rejected = [], []
    provenance = sampling_provenance(workspace.job)
    for group in groups:
        best = most_likely([episode for episode in group if reasons[episode.episode_id] is None])
        if best is not None:
            kept.append(to_record(best, provenance, spec.system))
        rejected += [
            _rejected_row(episode, reason) for episode in group if (reason := reasons[episode.episode_id])
        ]
    output = workspace.root / OUTPUT
    write_json_lines(output / "rejected.jsonl", rejected)
    kinds = Counter(reason.partition(":")[0] for reason in reasons.values() if reason)
    accepted = sum(reason is None for reason in reasons.values())
    right = accepted + kinds[LEAKED] + kinds[IMPLAUSIBLE]
    episodes = flatten(groups)
    figures: dict[str, Any] = {
        "rows": len(kept),
        "rejected": len(rejected),
        "accept_rate": accepted / answers,
        "pass_rate": outcome_figures(episodes, f"stage {workspace.job.stage}")["pass_rate"],
        "leak_rate": kinds[LEAKED] / max(right, 1),
        "implausible_rate": kinds[IMPLAUSIBLE] / max(right, 1),
    }
    for unhinted in without_system:
        episodes = flatten(unhinted)
        figures["unhinted_pass_rate"] = outcome_figures(episodes, "without system")["pass_rate"]
    workspace.metric(0, **figures)
    workspace.timing(0, **watch.figures())
    if not kept:
        reasons_found = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        raise WorkFailedError(
            f"none of {answers:,} answers was kept: {reasons_found}",
            where=f"stage {workspace.job.stage}",
            remedy="use a checkpoint that solves some tasks, or raise samples or max_tokens;"
            f" {OUTPUT}/rejected.jsonl in the run's directory has the answers",
        )
    write_records(output / "records.jsonl", kept)
    total = answers * (1 + len(without_system))
    workspace.progress(total, total, "answers", kept=len(kept))
    return {
        "kind": "dataset",
        **figures,
        "reasons": dict(kinds),
        "sources": {kept[0].source: len(kept)},
        "environment": player.environment.id,
        "seconds": watch.elapsed,
    }


def _sample(spec: RejectionSamplingSpec, player: Player, watch: Stopwatch) -> list[Groups]:
    """Return the groups with the system message, and those without it if there is a message."""
    tasks = player.training_tasks().take(spec.tasks)
    batches = [add_system_message(tasks, spec.system), tasks] if spec.system else [tasks]
    answers = spec.tasks * spec.samples
    return [
        player.play(
            batch,
            samples=spec.samples,
            temperature=spec.temperature,
            step=index,
            watch=watch,
            done=index * answers,
            total=len(batches) * answers,
        )
        for index, batch in enumerate(batches)
    ]


def _reasons_to_reject(groups: Groups, spec: RejectionSamplingSpec, player: Player) -> dict[str, str | None]:
    """Return the reason to reject each answer, by episode_id; None for a kept one.

    Only right answers can be leaks or implausible.
    """
    reasons = {episode.episode_id: reason_to_reject(episode) for group in groups for episode in group}
    right = [episode for group in groups for episode in group if reasons[episode.episode_id] is None]
    if spec.system:
        for episode in right:
            prompt, answer = (_text(episode, by_policy=by_policy) for by_policy in (False, True))
            if leak := find_leak(answer, spec.system, prompt, ngram=spec.ngram, phrases=spec.phrases):
                reasons[episode.episode_id] = f"{LEAKED}: {leak}"
    if spec.min_logprob is not None:
        prompts = [episode.opening[1 if spec.system else 0 :] for episode in right]
        ids = player.policy.tokenizer.encode_prompts(prompts)
        scores = player.engine.score(ids, [episode.token_ids.tolist() for episode in right], spec.temperature)
        for episode, logprobs in zip(right, scores, strict=True):
            lowest = float(logprobs[episode.loss_mask].min())
            if reasons[episode.episode_id] is None and lowest < spec.min_logprob:
                reasons[episode.episode_id] = (
                    f"{IMPLAUSIBLE}: a token at {lowest:.2f} nats without the system message"
                )
    return reasons


def _text(episode: Episode, *, by_policy: bool) -> str:
    """Return the text of the policy's messages, or of all others but the system message."""
    parts = [item["content"] for item in episode.messages[1:] if (item["role"] == "assistant") == by_policy]
    return "".join(parts)


def _rejected_row(episode: Episode, reason: str) -> dict[str, Any]:
    return {"task_id": episode.task_id, "source": "sampled", "text": episode.text, "reason": reason}
