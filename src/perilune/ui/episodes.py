"""Chooses the episodes of the report: whole groups, deterministically, within a budget of characters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from perilune.data.episode import Episode
from perilune.files import sha256_bytes
from perilune.ui.attempt import Attempt
from perilune.ui.curves import even_places
from perilune.ui.embedding import embeddable_json
from perilune.ui.pieces import Piece, Vocabulary
from perilune.ui.spans import list_step_rewards, span_lanes
from perilune.ui.turns import MAX_CHARACTERS, list_turns, shorten, shorten_messages, split_pieces

BUDGET_CHARACTERS = 6_500_000  # characters of JSON
MAX_STEPS = 160  # embedded steps of one stage
MIN_STEPS = 3
MAX_BYTES = 300_000_000  # bytes to read of the files of one stage
SHORT_CHARACTERS = 400  # characters of a text in a group that would otherwise be too large
SAMPLES_LABEL = "samples"  # label of the sampled answers of an evaluation
RIGHT_REWARD = 1.0  # a reward that counts as a right answer


@dataclass(frozen=True, eq=False)
class EpisodeSource:
    """A stage whose episodes are shown."""

    stage: str
    task: str
    attempt: Attempt


@dataclass
class EpisodeSet:
    """The embedded episodes of one step, or of one part of an evaluation, as embeddable JSON.

    A set that the page loads later has no JSON, but a `name` for `episode_sets.read_set`.
    """

    label: str
    step: int
    total: int
    embedded: int
    json: str
    name: str = ""


@dataclass
class StageEpisodes:
    """The sets of one stage; `vocabulary` indexes `EpisodeLibrary.vocabularies`, or is None.

    `steps` are the steps whose sets the page loads later; `sets` has the other sets.
    """

    stage: str
    task: str
    vocabulary: int | None
    sets: list[EpisodeSet] = field(default_factory=list)
    strategies: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


@dataclass
class EpisodeLibrary:
    """All data of the episode browser."""

    stages: list[StageEpisodes] = field(default_factory=list)
    vocabularies: list[list[tuple[str, bool]]] = field(default_factory=list)
    steps_left_out: int = 0

    @property
    def sampled(self) -> list[EpisodeSet]:
        """The sets of sampled episodes: all except traces."""
        return [episode_set for stage in self.stages if stage.task != "collect" for episode_set in stage.sets]


@dataclass(frozen=True, eq=False)
class EpisodeFile:
    """A file with the episodes of one step, or of one part of an evaluation."""

    source: EpisodeSource
    path: Path
    label: str
    step: int


def collect_episodes(sources: Sequence[EpisodeSource], budget: int = BUDGET_CHARACTERS) -> EpisodeLibrary:
    """Embed episodes of every source in at most `budget` characters of JSON.

    Files share the budget evenly, small files first, so that larger files get the rest. Each file contributes
    whole groups, in the order of the SHA-256 of their ids.
    """
    library = EpisodeLibrary()
    tokenizers = Tokenizers(sources)
    files: list[EpisodeFile] = []
    for source in sources:
        stage_files = list(list_files(source))
        most = _choose_step_count(stage_files, tokenizers, budget // len(sources))
        kept = [stage_files[place] for place in even_places(len(stage_files), most)]
        library.steps_left_out += len(stage_files) - len(kept)
        files += kept
    chosen: dict[EpisodeFile, tuple[EpisodeSet, set[str]]] = {}
    spent = 0
    for index, file in enumerate(sorted(files, key=lambda file: (file.path.stat().st_size, str(file.path)))):
        episodes = file.source.attempt.episodes(file.path)
        if episodes:
            share = max(0, budget - spent) // (len(files) - index)
            chosen[file] = embed_groups(file, episodes, tokenizers.find(file.source.stage, episodes), share)
            spent += len(chosen[file][0].json)
    for source in sources:
        embedded = [chosen[file] for file in files if file in chosen and file.source is source]
        if embedded:
            library.stages.append(
                StageEpisodes(
                    stage=source.stage,
                    task=source.task,
                    vocabulary=tokenizers.number(source.stage),
                    sets=[episode_set for episode_set, _ in embedded],
                    strategies=sorted({name for _, names in embedded for name in names}),
                )
            )
    library.vocabularies = [vocabulary.table for vocabulary in tokenizers.loaded]
    return library


def list_files(source: EpisodeSource) -> Iterator[EpisodeFile]:
    """Yield the episode files of a stage, in order of step."""
    is_evaluation = source.task == "evaluate"
    for step in source.attempt.episode_steps:
        label = SAMPLES_LABEL if is_evaluation else f"step {step}"
        yield EpisodeFile(source, source.attempt.episodes_path(step), label, step)
    if source.attempt.greedy_file is not None:
        yield EpisodeFile(source, source.attempt.greedy_file, "greedy answers", 1)


def _choose_step_count(files: list[EpisodeFile], tokenizers: Tokenizers, budget: int) -> int:
    """Return how many steps to embed, so that each has room for a group with tokens and reading is fast."""
    if len(files) <= MIN_STEPS:
        return len(files)
    middle = files[len(files) // 2]
    episodes = middle.source.attempt.episodes(middle.path)
    if not episodes:
        return MAX_STEPS
    group = [episode for episode in episodes if episode.group_id == episodes[0].group_id]
    cost = len(embeddable_json(_group_document(group, tokenizers.find(middle.source.stage, episodes))))
    most = min(MAX_STEPS, budget // cost, MAX_BYTES // middle.path.stat().st_size)
    return max(MIN_STEPS, most)


def embed_groups(
    file: EpisodeFile, episodes: list[Episode], vocabulary: Vocabulary | None, budget: int
) -> tuple[EpisodeSet, set[str]]:
    """Return whole groups of one file in at most `budget` characters, and the names of their strategies."""
    groups = [list(members) for _, members in groupby(episodes, key=lambda episode: episode.group_id)]
    order = sorted(range(len(groups)), key=lambda index: sha256_bytes(groups[index][0].group_id.encode()))
    taken: dict[int, str] = {}
    size = 0
    for index in order:
        text = embeddable_json(_group_document(groups[index], vocabulary))
        if size + len(text) > budget and taken:
            break
        # A group that is too large alone: omit its tokens, then shorten its texts.
        for most in (MAX_CHARACTERS, SHORT_CHARACTERS):
            if len(text) > budget:
                text = embeddable_json(_group_document(groups[index], None, most))
        if len(text) > budget:
            break
        taken[index] = text
        size += len(text) + 1
    strategies = {
        name.removeprefix("strategy/")
        for index in taken
        for episode in groups[index]
        for name, value in episode.metrics.items()
        if name.startswith("strategy/") and value > 0
    }
    chosen = EpisodeSet(
        label=file.label,
        step=file.step,
        total=len(episodes),
        embedded=sum(len(groups[index]) for index in taken),
        json="[" + ",".join(taken[index] for index in sorted(taken)) + "]",
    )
    return chosen, strategies


def _group_document(
    group: list[Episode], vocabulary: Vocabulary | None, most: int = MAX_CHARACTERS
) -> dict[str, Any]:
    first = group[0]
    prompt = shorten_messages(first.opening, most)
    rendered = shorten(vocabulary.prompt(first.prompt_ids.tolist()), most) if vocabulary else ""
    advantages = [episode.metrics.get("advantage") for episode in group]
    return {
        "id": first.group_id,
        "task": first.task_id,
        "expected": shorten(first.expected, most),
        "prompt": prompt,
        "rendered": "" if rendered == "".join(message["content"] for message in prompt) else rendered,
        "dead": any(value is not None for value in advantages) and not any(advantages),
        "episodes": [_episode_document(episode, vocabulary, most) for episode in group],
    }


def _episode_document(episode: Episode, vocabulary: Vocabulary | None, most: int) -> dict[str, Any]:
    turns = list_turns(episode)
    is_whole = all(len(turn["text"]) <= most for turn in (*(turns or ()), {"text": episode.text}))
    by_token = is_whole and len(episode.logprobs) <= most  # otherwise the page cannot show tokens
    if turns and not by_token:
        kept = [{name: turn[name] for name in ("role", "reward") if name in turn} for turn in turns]
        turns = [own | {"text": shorten(turn["text"], most)} for own, turn in zip(kept, turns, strict=True)]
    tokens: list[Piece] | None = None
    if vocabulary is not None and by_token:
        tokens = split_pieces(vocabulary, episode)
    logprobs = episode.logprobs if by_token else ()
    reference = episode.reference_logprobs if by_token else None
    return {
        "turns": turns,
        "id": episode.episode_id,
        "text": shorten(episode.text, most),
        "tokens": tokens,
        "logprobs": _thousandths(logprobs),
        "reference": None if reference is None else _thousandths(reference),
        "masked": None
        if not by_token or episode.loss_mask.all()
        else [int(not chosen) for chosen in episode.loss_mask],
        "top": _likely_tokens(episode, vocabulary) if tokens else None,
        "versions": _versions(episode),
        "steps": list_step_rewards(episode) if by_token else [],
        "spans": span_lanes(episode, most),
        "reward": _round_value(episode.reward),
        "terms": {name: _round_value(value) for name, value in episode.reward_terms.items()},
        "metrics": {
            name: _round_value(value) for name, value in episode.metrics.items() if name != "advantage"
        },
        "finish": episode.finish_reason,
        "failure": episode.failure,
        "advantage": _round_value(episode.metrics.get("advantage")),
    }


def _likely_tokens(episode: Episode, vocabulary: Vocabulary | None) -> list[list[tuple[int, int]]] | None:
    """Return the likeliest tokens at each position: (piece, log-prob in thousandths of a nat)."""
    if episode.top_ids is None or episode.top_logprobs is None or vocabulary is None:
        return None
    rows = zip(episode.top_ids.tolist(), episode.top_logprobs.tolist(), strict=True)
    return [
        [
            (vocabulary.token_piece(token), logprob)
            for token, logprob in zip(row[0], _thousandths(row[1]), strict=True)
        ]
        if row[0][0] >= 0
        else []
        for row in rows
    ]


def _thousandths(logprobs: Iterable[float]) -> list[int]:
    """Return log-probs as whole thousandths of a nat, to save bytes."""
    return [round(1000 * max(-1000.0, float(value))) for value in logprobs]


def _versions(episode: Episode) -> int | list[tuple[int, int]]:
    """Return the policy version of all tokens, or (version, tokens) runs if the weights changed meanwhile."""
    versions = {int(version) for version in episode.policy_version[episode.loss_mask]}
    if len(versions) == 1:
        return versions.pop()
    return [(int(version), len(list(run))) for version, run in groupby(episode.policy_version.tolist())]


def _round_value(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


class Tokenizers:
    """Finds the tokenizer of each stage: the first that reproduces the text of the answers exactly.

    Tries the tokenizers of the stage, then those of the other stages, then that of the recipe's new model.
    """

    def __init__(self, sources: Sequence[EpisodeSource]) -> None:
        folders = {source.stage: source.attempt.model_folders for source in sources}
        self._new_models = [source.attempt.job.get("model") or {} for source in sources]
        self._candidates = {
            stage: [*own, *(folder for other, paths in folders.items() if other != stage for folder in paths)]
            for stage, own in folders.items()
        }
        self._by_digest: dict[str, Vocabulary | None] = {}
        self._chosen: dict[str, Vocabulary | None] = {}

    @property
    def loaded(self) -> list[Vocabulary]:
        """Vocabularies in the order of their numbers."""
        return list(dict.fromkeys(value for value in self._chosen.values() if value is not None))

    def number(self, stage: str) -> int | None:
        """Return the index of the stage's vocabulary in `loaded`."""
        vocabulary = self._chosen.get(stage)
        return None if vocabulary is None else self.loaded.index(vocabulary)

    def find(self, stage: str, episodes: Sequence[Episode]) -> Vocabulary | None:
        """Return the vocabulary that reproduces the text of these episodes, or None."""
        if stage not in self._chosen:
            loaded = map(self._load, self._documents(stage))
            self._chosen[stage] = next((item for item in loaded if item and _spells(item, episodes)), None)
        return self._chosen[stage]

    def _documents(self, stage: str) -> Iterator[str]:
        for folder in self._candidates[stage]:
            if (file := folder / "tokenizer.json").is_file():
                yield file.read_text("utf-8", errors="replace")
        for model in self._new_models:
            if model.get("preset"):
                from perilune.models.text.tokenizer import Tokenizer

                yield Tokenizer.for_new_model(model).to_json()

    def _load(self, document: str) -> Vocabulary | None:
        digest = sha256_bytes(document.encode())
        if digest not in self._by_digest:
            try:
                self._by_digest[digest] = Vocabulary(document)
            except ValueError:
                self._by_digest[digest] = None
        return self._by_digest[digest]


def _spells(vocabulary: Vocabulary, episodes: Sequence[Episode]) -> bool:
    return all(split_pieces(vocabulary, episode) is not None for episode in episodes[:16])
