"""Records sampled from a checkpoint: the most likely right answer to each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import perilune
from perilune.data.generators.registry import replace_paths_by_digests
from perilune.data.generators.teacher import Candidate, Rejected
from perilune.data.records import Provenance, TraceRecord, settings_digest
from perilune.engine.request import SamplingParams
from perilune.environments.core.protocol import Environment, Task
from perilune.files import sha256_file
from perilune.models.checkpoints.loading import load_checkpoint
from perilune.rollout.timing import Stopwatch
from perilune.rollout.worker import RolloutWorker
from perilune.tasks.datasets.own_traces import most_likely, reason_to_reject, to_record
from perilune.tasks.stage.memory_plan import make_engine, planned_episode_tokens, require_prompt_room
from perilune.verifiers import Scorer


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings: answers per task, most tokens of an answer, temperature and seed."""

    samples: int
    max_tokens: int
    temperature: float
    seed: int


class Sampled:
    """Samples several answers to each task, and keeps one that passed."""

    def __init__(
        self, rollouts: RolloutWorker, params: SamplingParams, samples: int, provenance: Provenance
    ) -> None:
        self._rollouts, self._params, self._samples = rollouts, params, samples
        self.provenance = provenance

    @classmethod
    def open(
        cls,
        folder: Path,
        section: Mapping[str, Any],
        environment: Environment,
        scorer: Scorer,
        sampling: Sampling,
    ) -> Sampled:
        """Load the checkpoint in `folder`.

        Raises:
            RequestError: when the checkpoint cannot be read, or the answers leave no room for a prompt.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        decoder, tokenizer = load_checkpoint(folder, device)
        config = decoder.config
        require_prompt_room(config, sampling.max_tokens)
        longest = planned_episode_tokens(section, sampling.max_tokens, config)
        engine = make_engine(decoder, longest, tokenizer)
        params = SamplingParams(sampling.max_tokens, sampling.temperature, config.eos_token_ids)
        files = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}
        settings = settings_digest(
            checkpoint=files, environment=replace_paths_by_digests(section), sampling=asdict(sampling)
        )
        rollouts = RolloutWorker(engine, tokenizer, scorer, environment, sampling.seed)
        return cls(rollouts, params, sampling.samples, Provenance("sampled", perilune.__version__, settings))

    def rows(self, tasks: Sequence[Task], first: int) -> Iterator[TraceRecord | Rejected]:
        """Yield for each task the most likely answer that passed untruncated; all others as rejected.

        Raises:
            WorkFailedError: when more episodes fail than the environment's section allows.
        """
        if not tasks:
            return
        by_id = {task.task_id: task for task in tasks}
        groups = self._rollouts.play(
            tasks, samples=self._samples, params=self._params, step=0, watch=Stopwatch(), first=first
        )
        for group in groups:
            best = most_likely([episode for episode in group if reason_to_reject(episode) is None])
            if best is not None:
                yield to_record(best, self.provenance)
            for episode in group:
                if episode is not best:
                    reason = reason_to_reject(episode) or "right, and less likely than another"
                    yield Rejected(Candidate(by_id[episode.task_id], episode.text, "sampled/own"), reason)
