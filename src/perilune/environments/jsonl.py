"""Tasks of one's own in JSON Lines: a row is a question, and what it takes to judge an answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perilune.environments.jsonl_rows import Broken, Row, read_rows
from perilune.environments.matching import Match, last_number, matches
from perilune.environments.protocol import Failure, Outcome, Score, Split, Task, Transcript
from perilune.environments.single_turn import SingleTurn
from perilune.errors import RequestError


class HeldOut(BaseModel):
    """Which rows are kept for evaluations: a share, those that a column marks, or those of another file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(
        0.1, gt=0, lt=1, description="about this share of all tasks, chosen by a digest of what they ask"
    )
    column: str | None = Field(None, description="instead: the rows in which this column has `value`")
    value: str | bool = Field("test", description="what the column says of rows that are held out")
    path: str | None = Field(None, description="instead: the rows of this file or folder")

    @model_validator(mode="after")
    def _one_way(self) -> HeldOut:
        if self.column is not None and self.path is not None:
            raise ValueError("has both column and path; choose one")
        return self


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
        self._splits = self._read()
        for split, rows in self._splits.items():
            if not rows:
                raise RequestError(f"no row of {spec.path} is for {split}", where="environment.heldout")

    def settings(self) -> dict[str, Any]:
        """How many tasks there are."""
        return {split: len(rows) for split, rows in self._splits.items()}

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Every row of the split once, shuffled by `seed`."""
        rows = list(self._splits[split])
        random.Random(f"jsonl/{seed}").shuffle(rows)
        for row in rows:
            yield Task(row.task_id, row.prompt, row.data)

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

    def _read(self) -> dict[Split, list[Row]]:
        spec, held_out = self.spec, self.spec.heldout
        if held_out.path is not None:  # read first, so that a row in both is one that training lacks
            kept, train = read_rows((Path(held_out.path), Path(spec.path)), spec.match, spec.broken_rows)
            return {"train": train, "heldout": kept}
        (rows,) = read_rows((Path(spec.path),), spec.match, spec.broken_rows)
        splits: dict[Split, list[Row]] = {"train": [], "heldout": []}
        for row in rows:
            splits["heldout" if _is_held_out(row, held_out) else "train"].append(row)
        return splits


def _is_held_out(row: Row, held_out: HeldOut) -> bool:
    if held_out.column is None:
        return int(row.task_id[:8], 16) < held_out.share * (1 << 32)
    if held_out.column not in row.data:
        raise RequestError(f"has no column '{held_out.column}'", where=row.place, remedy="heldout.column")
    said = row.data[held_out.column]
    return type(said) is type(held_out.value) and said == held_out.value
