"""Tasks of one's own in JSON Lines: a row is a question, and what it takes to judge an answer."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from perilune.environments.builtin.jsonl_index import HeldOut, RowIndex, indexed
from perilune.environments.builtin.jsonl_rows import Broken
from perilune.environments.core.matching import Match, last_number, matches
from perilune.environments.core.protocol import Failure, Outcome, Score, Split, Task, Transcript
from perilune.environments.core.single_turn import SingleTurn
from perilune.errors import RequestError


class JsonlSpec(BaseModel):
    """The environment section of a recipe, for `id: jsonl`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Literal["jsonl"] = Field("jsonl", description="which environment this is")
    path: str = Field(description="file of JSON Lines, or folder of *.jsonl, relative to the recipe")
    match: Match | None = Field(
        "exact",
        description="how an output is held against `answer`; null where `rewards` has functions instead",
    )
    heldout: HeldOut = Field(HeldOut(), description="which rows are kept for evaluations")
    broken_rows: Broken = Field(
        "stop", description="a broken row ends the work; or all are left out, counted and told"
    )


class JsonlEnvironment(SingleTurn):
    """Reward 1 for the stated answer; with `match: null` no verdict, where reward functions have it.

    Raises:
        RequestError: naming file and line of what cannot be read or is broken, or the split that is empty.
    """

    Spec = JsonlSpec
    files: ClassVar = ("path", "heldout.path")  # fields that name what a bundle has to hold

    def __init__(self, spec: JsonlSpec) -> None:
        self.spec = spec
        self.id = "jsonl"
        self.judges = spec.match is not None

    def check_files(self) -> None:
        """Look at every row, once. Scoring needs none of them."""
        for split, rows in self._index().splits.items():
            if not len(rows):
                raise RequestError(f"no row of {self.spec.path} is for {split}", where="environment.heldout")

    @staticmethod
    def has_verdict(section: Mapping[str, Any]) -> bool:
        """Whether answers are compared, or reward functions have to judge."""
        return section.get("match", "exact") is not None

    def settings(self) -> dict[str, Any]:
        """How many tasks there are."""
        return {split: len(rows) for split, rows in self._index().splits.items()}

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Every row of the split once, shuffled by `seed`, and read when it is its turn."""
        index = self._index()
        order = array("I", index.splits[split].tobytes())
        random.Random(f"jsonl/{seed}").shuffle(order)
        for number in order:
            row = index.row(number)
            yield Task(row.task_id, row.prompt, row.data)

    def _index(self) -> RowIndex:
        return indexed(self.spec.path, self.spec.match, self.spec.broken_rows, self.spec.heldout)

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Hold the output against the answer; what the token limit cut off is none."""
        if self.spec.match is None:
            return Failure("verifier", "match is null, and no reward function judges instead")
        right = matches(self.spec.match, transcript.text, task.data["answer"])
        return Score(float(right and transcript.finished), {"match": float(right)})

    def gold(self, task: Task) -> Transcript | None:
        """The answer alone; None where the row states none, or a pattern."""
        answer = task.data.get("answer")
        return None if answer is None or self.spec.match == "regex" else Transcript(answer)

    def is_right(self, task: Task, transcript: Transcript) -> bool | None:
        """A second opinion, for audits: the answer alone is right, and one that is not there is wrong."""
        answer = task.data.get("answer")
        if answer is None or self.spec.match in (None, "regex"):
            return None
        said, wanted = transcript.text.strip(), answer.strip()
        if said == wanted:
            return True
        if self.spec.match == "number":
            return None if last_number(said) is not None else False
        return None if self.spec.match == "contains" and wanted.casefold() in said.casefold() else False
