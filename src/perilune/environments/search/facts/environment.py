"""Questions about generated documents, which only an environment such as `search` can show."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Literal

from pydantic import Field

from perilune.environments.core.protocol import Score, Split, Task, Transcript
from perilune.environments.core.single_turn import SingleTurn
from perilune.environments.core.splits import MAX_REJECTED_DRAWS, generate_task_ids
from perilune.environments.search.corpus import Corpus
from perilune.environments.search.facts.questions import (
    KINDS,
    Kind,
    compute_answer,
    draw_question,
    write_question,
)
from perilune.environments.search.facts.world import MAX_COMPANIES, Style, draw_world, make_corpus
from perilune.files import canonical_json, sha256_bytes
from perilune.frozen import Frozen

ANSWER_MARK = ";"


class FactsSpec(Frozen):
    """The environment section of a recipe, for `id: facts`."""

    id: Literal["facts"] = Field("facts", description="id of the environment")
    companies: int = Field(
        100,
        ge=4,
        le=MAX_COMPANIES,
        description="companies in each corpus; a corpus has about six documents per company",
    )
    corpora: int = Field(
        4, ge=1, le=1000, description="number of corpora in each split; no corpus is in both splits"
    )
    kinds: tuple[Kind, ...] = Field(
        KINDS,
        min_length=1,
        description="kinds of questions. one: the city, product or head of a company; two: the city where"
        " the head of a company lives; count: the number of companies in a city; join: the"
        " number of companies in a city that make a given product",
    )
    style: Style = Field("natural", description="compact: a few characters, for character-level models")


class FactsEnvironment(SingleTurn):
    """Reward 1 for the right answer. The prompt has only the question."""

    Spec = FactsSpec

    def __init__(self, spec: FactsSpec) -> None:
        self.spec = spec
        self.id = "facts"
        self.own_format = "after ';'" if spec.style == "compact" else ""

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield distinct questions about the corpora in turn, until a corpus has no new ones."""
        spec = self.spec
        worlds = list(itertools.islice(generate_task_ids("facts", split, seed), spec.corpora))
        task_ids: set[str] = set()
        rejected = 0
        for number in itertools.count():
            draw = random.Random(f"facts/{seed}/{split}/{number}")
            name = worlds[number % len(worlds)]
            world = draw_world(name, spec.companies)
            question = draw_question(world, draw.choice(spec.kinds), draw)
            digest = sha256_bytes(canonical_json([spec.companies, spec.style, asdict(question)]))
            task_id = name[:24] + digest[:8]
            if task_id in task_ids:
                rejected += 1
                if rejected == MAX_REJECTED_DRAWS:
                    return
                continue
            task_ids.add(task_id)
            rejected = 0
            prompt = ({"role": "user", "content": write_question(question, spec.style)},)
            data = {
                "world": name,
                "companies": spec.companies,
                "style": spec.style,
                "question": asdict(question),
                "answer": compute_answer(world, question),
            }
            yield Task(task_id, prompt, data, difficulty=float(KINDS.index(question.kind)))

    def score(self, task: Task, transcript: Transcript) -> Score:
        """Compare names without case, emphasis and a full stop. A truncated answer scores 0."""
        answer = transcript.text.strip(" \n*_\"'.").casefold()
        right = transcript.finished and answer == self.reply(task, task.data["answer"])
        return Score(float(right), metrics={f"right/{task.data['question']['kind']}": float(right)})

    def gold(self, task: Task) -> Transcript:
        return Transcript(self.reply(task, task.data["answer"]))

    def corpus(self, task: Task) -> Corpus:
        """Return the documents that the task is about."""
        return make_corpus(task.data["world"], task.data["companies"], task.data["style"])

    def reply(self, task: Task, answer: str) -> str:
        """Return the text that `score` takes for this answer."""
        return ANSWER_MARK + answer if task.data["style"] == "compact" else answer
