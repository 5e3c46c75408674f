"""Requests for a short text on a topic, with constraints that code can check."""

import hashlib
import itertools
import json
import random
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from perilune.environments.builtin.instructions.constraints import (
    KINDS,
    decode_json_text,
    is_sound,
    topic_stem,
)
from perilune.environments.builtin.instructions.right_answer import write_answer
from perilune.environments.builtin.instructions.second_opinion import satisfies_request
from perilune.environments.builtin.instructions.vocabulary import LANGUAGES, REQUESTS, TOPICS
from perilune.environments.core.protocol import Outcome, Score, Split, Task, Transcript
from perilune.environments.core.single_turn import SingleTurn
from perilune.environments.core.splits import select_unique
from perilune.frozen import Frozen

KindName = Literal[
    "min_words", "max_words", "sentences", "keywords", "forbidden", "frequency", "bullets", "json", "title",
    "paragraphs", "lowercase", "uppercase", "no_commas", "start", "end", "language",
]  # fmt: skip
SOUND_TERM = "sound"  # the term of an answer that is about the topic, short, and no echo


class InstructionsSpec(Frozen):
    """The environment section of a recipe, for `id: instructions`."""

    id: Literal["instructions"] = Field("instructions", description="id of the environment")
    constraints: int = Field(3, ge=1, le=3, description="maximum constraints of a request")
    kinds: tuple[KindName, ...] = Field((), description="kinds of constraints to draw from; empty: all")
    words: int = Field(
        60,
        ge=40,
        description="maximum words of an answer with a reward above 0. Each request states this number,"
        " unless it has the constraint max_words",
    )
    partial: bool = Field(
        False,
        description="true: the reward is the share of satisfied constraints; false: 1 if all are"
        " satisfied, else 0",
    )


class InstructionsEnvironment(SingleTurn):
    """Requests for a short text on a topic, with one to three constraints. Reward 1 if all are satisfied.

    Each constraint is a term with the value 1 or 0, named after its kind. The term "sound" is 1 for a text
    that is about the topic, keeps the length that the request states, and is no echo; other texts have
    reward 0.
    """

    Spec = InstructionsSpec

    def __init__(self, spec: InstructionsSpec) -> None:
        self.spec = spec
        self.id = "instructions"
        self._kinds: tuple[str, ...] = spec.kinds or tuple(KINDS)

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        draw = random.Random(f"{self.id}/{seed}")
        requests = (self._draw_request(draw) for _ in itertools.count())
        by_digest = (
            (_digest_request(request["topic"], request["asked"]), request)
            for request in requests
            if request is not None
        )
        return (_make_task(digest, request) for digest, request in select_unique(split, by_digest))

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Check the constraints. A text that the token limit cut off satisfies none."""
        terms = check_constraints(task.data, transcript.text if transcript.finished else "")
        share = sum(value for name, value in terms.items() if name != SOUND_TERM) / (len(terms) - 1)
        reward = share if self.spec.partial else float(share == 1)
        return Score(reward * terms[SOUND_TERM], terms)

    def gold(self, task: Task) -> Transcript:
        return Transcript(task.data["answer"])

    def is_right(self, task: Task, transcript: Transcript) -> bool:
        return transcript.finished and satisfies_request(task.data, transcript.text)

    def _draw_request(self, draw: random.Random) -> dict[str, Any] | None:
        """Return a request with its right answer; None if this draw has none."""
        topic = draw.choice(list(TOPICS))
        constraints: dict[str, dict[str, Any]] = {}
        excluded: set[str] = set()
        kinds = draw.sample(self._kinds, len(self._kinds))
        count = draw.randint(1, min(self.spec.constraints, len(kinds)))
        for kind in (KINDS[name] for name in kinds):
            if len(constraints) < count and not excluded & kind.excludes:
                constraints[kind.name] = kind.draw(draw)
                excluded |= kind.excludes
        if "language" in constraints:
            language_index = list(LANGUAGES).index(constraints["language"]["language"])
            constraints["language"]["word"] = TOPICS[topic][language_index]
        instructions = " ".join(KINDS[name].template.format(**params) for name, params in constraints.items())
        request = draw.choice(REQUESTS).format(topic=topic)
        if "max_words" not in constraints:
            request += f" Use at most {self.spec.words} words."
        data = {
            "topic": topic,
            "asked": constraints,
            "words": self.spec.words,
            "request": f"{request} {instructions}",
            "answer": write_answer(topic, constraints, draw),
        }
        return data if all(check_constraints(data, str(data["answer"])).values()) else None


def check_constraints(data: Mapping[str, Any], text: str) -> dict[str, float]:
    """Return the terms of a text for a request: each kind of constraint, and "sound".

    Letters in other forms, such as bold or full-width ones, count as plain letters.
    """
    text = unicodedata.normalize("NFKC", text)
    language = data["asked"].get("language", {}).get("language")
    plain = unicodedata.normalize("NFKC", decode_json_text(text)) if "json" in data["asked"] else text
    terms = {
        name: float(KINDS[name].is_satisfied(text if name == "json" else plain, params))
        for name, params in data["asked"].items()
    }
    topic_word = topic_stem(data["topic"], language)
    return {**terms, SOUND_TERM: float(is_sound(plain, data["request"], topic_word, data["words"]))}


def _make_task(digest: str, data: Mapping[str, Any]) -> Task:
    prompt = ({"role": "user", "content": data["request"]},)
    return Task(digest[:32], prompt, data, difficulty=float(len(data["asked"])))


def _digest_request(topic: str, constraints: Mapping[str, Any]) -> str:
    """Return the digest of topic and constraints, so that no rewording of a request is in both splits."""
    return hashlib.sha256(json.dumps([topic, constraints], sort_keys=True).encode()).hexdigest()
