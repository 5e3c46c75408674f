"""Tasks in JSON Lines files: each row holds a question and, if answers are compared, the reference answer."""

import random
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from perilune.environments.builtin.jsonl_index import BrokenRowPolicy, HeldOut, RowIndex, load_index
from perilune.environments.core.matching import Match, find_last_number, matches
from perilune.environments.core.protocol import Failure, Outcome, Score, Split, Task, Transcript
from perilune.environments.core.single_turn import SingleTurn
from perilune.errors import RequestError
from perilune.frozen import Frozen


class JsonlSpec(Frozen):
    """The environment section of a recipe, for `id: jsonl`."""

    id: Literal["jsonl"] = Field("jsonl", description="id of the environment")
    path: str = Field(description="JSON Lines file, or folder of *.jsonl files, relative to the recipe")
    match: Match | None = Field(
        "exact",
        description="how an output is compared with the row's `answer`; null: no comparison, and the"
        " functions in `rewards` score",
    )
    heldout: HeldOut = Field(HeldOut(), description="which rows are reserved for evaluation")
    broken_rows: BrokenRowPolicy = Field(
        "stop", description="stop: refuse invalid rows; drop: leave them out and log their number"
    )


class JsonlEnvironment(SingleTurn):
    """Reward 1 for the reference answer. With `match: null` it has no reward of its own, and reward functions
    score.

    Raises:
        RequestError: naming file and line of an unreadable or invalid row, or the empty split.
    """

    Spec = JsonlSpec
    files: ClassVar = ("path", "heldout.path")  # a bundle includes these files

    def __init__(self, spec: JsonlSpec) -> None:
        self.spec = spec
        self.id = "jsonl"
        self.judges = spec.match is not None

    def check_files(self) -> None:
        """Validate every row once. Scoring does not need the files."""
        for split, rows in self._index().splits.items():
            if not len(rows):
                raise RequestError(
                    f"{self.spec.path} has no {'held-out' if split == 'heldout' else 'training'} rows",
                    where="environment.heldout",
                    remedy="use more rows, another share, or heldout: {path: test.jsonl}",
                )

    @staticmethod
    def has_verdict(section: Mapping[str, Any]) -> bool:
        """Return whether the environment scores answers itself."""
        return section.get("match", "exact") is not None

    def settings(self) -> dict[str, Any]:
        """Return the number of tasks in each split."""
        return {split: len(rows) for split, rows in self._index().splits.items()}

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield every row of the split once, shuffled by `seed`. A row is read when it is yielded."""
        index = self._index()
        order = array("I", index.splits[split].tobytes())
        random.Random(f"jsonl/{seed}").shuffle(order)
        for number in order:
            row = index.row(number)
            yield Task(row.task_id, row.prompt, row.data)

    def characters(self) -> dict[str, str]:
        """Return the characters of rows that are not all printable ASCII, with the FILE:LINE of the first."""
        return self._index().characters

    def _index(self) -> RowIndex:
        return load_index(self.spec.path, self.spec.match, self.spec.broken_rows, self.spec.heldout)

    def score(self, task: Task, transcript: Transcript) -> Outcome:
        """Compare the output with the reference answer. A truncated output has reward 0."""
        if self.spec.match is None:
            return Failure("verifier", "match is null and there is no reward function")
        right = matches(self.spec.match, transcript.text, task.data["answer"])
        return Score(float(right and transcript.finished), {"match": float(right)})

    def gold(self, task: Task) -> Transcript | None:
        """Return the reference answer alone; None if the row has none or it is a regular expression."""
        answer = task.data.get("answer")
        return None if answer is None or self.spec.match == "regex" else Transcript(answer)

    def context(self, task: Task) -> str:
        """Return the text in the column `context`, for an agent that explores it with code.

        Raises:
            RequestError: when the row has none.
        """
        text = task.data.get("context")
        if not isinstance(text, str):
            raise RequestError(
                "a row has no text in the column `context`",
                where=self.spec.path,
                remedy="write the text that its question is about there",
            )
        return text

    def question(self, task: Task) -> str:
        return "\n\n".join(message["content"] for message in task.prompt)

    def is_right(self, task: Task, transcript: Transcript) -> bool | None:
        """Return a second opinion for audits: True for the reference answer alone, False without it."""
        answer = task.data.get("answer")
        if answer is None or self.spec.match in (None, "math", "regex"):
            return None
        output, expected = transcript.text.strip(), answer.strip()
        if output == expected:
            return True
        if self.spec.match == "number":
            return None if find_last_number(output) is not None else False
        return None if self.spec.match == "contains" and expected.casefold() in output.casefold() else False
