"""Measures a checkpoint before and after a stage: English text, other environments, and the KL to the start.

Both checkpoints are read from their folders, one after the other. All figures are paired: the same passages,
tasks and random numbers before and after.
"""

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch

from perilune.bundle.workspace import Workspace
from perilune.data.episode import Episode
from perilune.engine.engine import Engine
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Environment
from perilune.environments.core.registry import make_environment
from perilune.errors import WorkFailedError
from perilune.files import read_json
from perilune.metrics.bootstrap import bootstrap_problems, paired_difference
from perilune.metrics.forgetting import forgetting_rows, forgetting_warnings
from perilune.metrics.proportion import pass_rate_change, pass_rate_interval
from perilune.models.checkpoints.stored import open_checkpoint
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.memory import plan_memory
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.forgetting.settings import ForgettingSettings
from perilune.tasks.stage.outcomes import is_correct
from perilune.verifiers import Scorer
from perilune.watchdog import Watchdog

DIGEST = "sha256:0e03ab53ba6523a2abf4454f3955c14c33cd996c7c534123bce559de1ee011ed"
CONTEXT_TOKENS = 16  # first tokens of a passage, which are not scored
SLOTS = 32  # samples in flight
SLOT_TOKENS = 512  # tokens of a sample that there is room for in every slot


@dataclass(frozen=True)
class Checkpoint:
    """The measurements of one checkpoint.

    Attributes:
        nats: by passage, the negative log-likelihood of its scored tokens in nats.
        passes: by environment, the share of right answers by task.
    """

    nats: Mapping[str, float]
    passes: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Passage:
    """A passage as tokens: `scored` follow `context`; `size` is the number of bytes of the scored text."""

    name: str
    context: list[int]
    scored: list[int]
    size: int


def read_english() -> str:
    """Return the text: 24 passages of this package's documentation, as they were when the text was made.

    Raises:
        ValueError: when the file is not the one whose digest is recorded here.
    """
    text = resources.files("perilune.tasks.forgetting").joinpath("english.txt").read_text(encoding="utf-8")
    if f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" != DIGEST:
        raise ValueError("english.txt is not the text of the recorded digest")
    return text


def measure_forgetting(
    workspace: Workspace, settings: ForgettingSettings, before: Path, after: Path, device: torch.device
) -> dict[str, Any]:
    """Measure the checkpoints in the folders `before` and `after`; return the figures for the summary."""
    began = time.monotonic()
    _check_memory(after, device)
    own = dict(workspace.job.environment)
    sections = settings.sections(own)
    trained = _Measurement(workspace, settings, after, device)
    later = trained.checkpoint(sections)
    answers = trained.answers(own, make_environment(own)) if settings.tasks and own else []
    tokenizer = trained.tokenizer
    del trained  # so that one engine at a time is in memory
    start = _Measurement(workspace, settings, before, device, tokenizer)
    earlier = start.checkpoint(sections)
    seed = workspace.job.seed
    figures: dict[str, Any] = {}
    if settings.passages:
        figures["text"] = _text_figures(start.passages, earlier, later, seed)
    figures["environments"] = [_environment_figures(name, earlier, later, seed) for name in later.passes]
    if answers:
        figures["kl"] = _kl_figures(answers, start.engine, seed)
    key = "kl" if "kl" in workspace.job.spec else "lora"
    figures["warnings"] = forgetting_warnings(figures, key)
    for row in forgetting_rows(figures):
        workspace.log(
            f"forgetting: {row.measure}: {row.before} before, {row.after} after {row.change}".rstrip()
        )
    for warning in figures["warnings"]:
        workspace.log(f"warning: {warning}")
    return figures | {"seconds": time.monotonic() - began}


def _check_memory(folder: Path, device: torch.device) -> None:
    """Refuse to load a second model that may not fit beside the one that was trained."""
    if device.type != "cpu":
        return
    config = DecoderConfig.from_hf(read_json(folder / "config.json"), where=str(folder))
    plan = plan_memory(config, sampling=(SLOTS, min(SLOT_TOKENS, config.max_position_embeddings)))
    needed = plan.persistent["engine"] + plan.persistent["cache"] + plan.transient["sampling"]
    free = psutil.virtual_memory().available
    if needed > free:
        raise WorkFailedError(
            f"an engine needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free", where="memory"
        )


class _Measurement:
    """A loaded checkpoint with its engine.

    Args:
        tokenizer: replaces that of the folder, which may have another chat template than the recipe.
    """

    def __init__(
        self,
        workspace: Workspace,
        settings: ForgettingSettings,
        folder: Path,
        device: torch.device,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._workspace, self._settings = workspace, settings
        decoder, own_tokenizer = open_checkpoint(folder, device)
        self.tokenizer = tokenizer or own_tokenizer
        config = decoder.config
        room = SLOTS * min(SLOT_TOKENS, config.max_position_embeddings)
        self.engine = Engine(
            decoder, slots=SLOTS, cache_tokens=room, score_tokens=4096, tokenizer=self.tokenizer
        )
        ends = dict.fromkeys((*config.eos_token_ids, self.tokenizer.eos_token_id))
        self._ends = tuple(token for token in ends if token < config.vocab_size)
        self.passages = _passages(self.tokenizer, settings.passages)

    def checkpoint(self, sections: Sequence[Mapping[str, Any]]) -> Checkpoint:
        """Score the passages, and answer the tasks of the environments."""
        nats = {}
        with Watchdog("scoring of English text") as waiting:
            for passage in self.passages:
                (scores,) = self.engine.score([passage.context], [passage.scored])
                nats[passage.name] = -float(scores.sum(dtype="float64"))
                waiting.progress()
        passes: dict[str, dict[str, float]] = {}
        for section in sections:
            rates: dict[str, list[bool]] = {}
            environment = make_environment(section)
            for episode in self.answers(section, environment):
                if not episode.failure:
                    rates.setdefault(episode.task_id, []).append(is_correct(episode))
            passes[environment.id] = {task: sum(results) / len(results) for task, results in rates.items()}
        return Checkpoint(nats, passes)

    def answers(self, section: Mapping[str, Any], environment: Environment) -> list[Episode]:
        """Return sampled and scored answers to held-out tasks of the section's environment."""
        settings, seed = self._settings, self._workspace.job.seed
        tasks = list(islice(environment.tasks("heldout", seed), settings.tasks))
        with Scorer(section) as scorer:
            worker = RolloutWorker(self.engine, self.tokenizer, scorer, environment, seed)
            params = SamplingParams(settings.max_tokens, 1.0, self._ends)
            groups = worker.play(tasks, samples=settings.samples, params=params, step=0, watch=Stopwatch())
        return [episode for group in groups for episode in group]


def _passages(tokenizer: Tokenizer, count: int) -> list[Passage]:
    passages = []
    for index, text in enumerate(read_english().strip().split("\n\n")[:count]):
        tokens = tokenizer.encode(text)
        context, scored = tokens[:CONTEXT_TOKENS], tokens[CONTEXT_TOKENS:]
        passages.append(Passage(str(index), context, scored, len(tokenizer.decode(scored).encode())))
    return passages


def _text_figures(
    passages: Sequence[Passage], earlier: Checkpoint, later: Checkpoint, seed: int
) -> dict[str, Any]:
    """Return the perplexity per token and bits per byte before and after; the change is paired by passage."""
    size, tokens = sum(passage.size for passage in passages), sum(len(passage.scored) for passage in passages)
    bits = [
        {passage.name: checkpoint.nats[passage.name] / math.log(2) / passage.size for passage in passages}
        for checkpoint in (earlier, later)
    ]
    nats = [math.fsum(checkpoint.nats.values()) for checkpoint in (earlier, later)]
    perplexity = [math.exp(total / tokens) for total in nats]
    return {
        "digest": DIGEST,
        "passages": len(passages),
        "tokens": tokens,
        "perplexity": {"before": perplexity[0], "after": perplexity[1]},
        "bits_per_byte": {
            "before": nats[0] / math.log(2) / size,
            "after": nats[1] / math.log(2) / size,
            "change": paired_difference(*bits, seed=seed)._asdict(),
        },
    }


def _environment_figures(name: str, earlier: Checkpoint, later: Checkpoint, seed: int) -> dict[str, Any]:
    """Return pass@1 in another environment before and after; the change is paired by task."""
    before, after = earlier.passes[name], later.passes[name]
    shared = sorted(before.keys() & after.keys())  # tasks without a verdict are missing
    sides = [{task: side[task] for task in shared} for side in (before, after)]
    figures = {
        label: pass_rate_interval(list(side.values()), seed=seed)._asdict()
        for label, side in zip(("before", "after"), sides, strict=True)
    }
    change = pass_rate_change(*sides, seed=seed)._asdict()
    return {"environment": name, "tasks": len(shared), "pass@1": {**figures, "change": change}}


def _kl_figures(answers: Sequence[Episode], start: Engine, seed: int) -> dict[str, Any]:
    """Return KL(policy, start) in nats on answers that the policy sampled to held-out tasks.

    The estimate sums log-prob differences over the sampled tokens (k1). The interval is over tasks.
    """
    with Watchdog("scoring of the policy's answers"):
        scores = start.score(
            [answer.prompt_ids.tolist() for answer in answers],
            [answer.token_ids.tolist() for answer in answers],
        )
    gaps: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        gap = float((answer.logprobs - score)[answer.loss_mask].sum(dtype="float64"))
        gaps[answer.task_id].append(gap)
    tokens = sum(int(answer.loss_mask.sum()) for answer in answers)
    return {
        "answers": len(answers),
        "per_answer": bootstrap_problems([fmean(own) for own in gaps.values()], seed=seed)._asdict(),
        "per_token": math.fsum(gap for own in gaps.values() for gap in own) / max(tokens, 1),
    }
