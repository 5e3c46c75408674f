"""A task to probe, and a probe: a rule that writes outputs whose quality is known in advance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from perilune.environments.core.protocol import Task, Transcript
from perilune.verifiers.audit.forms import BARE, Form

OutputKind = Literal["right", "equivalent", "wrong", "unknown", "enumerated", "listed", "filled", "copied"]
"""The outputs of a probe, in this order: the gold answer; the gold answer in another form; wrong for every
task; wrong unless a second opinion disagrees; all answers of a closed set at once; the gold answer among
wrong ones; the gold answer after filler; copied from the prompt."""


def prompt_text(task: Task) -> str:
    return "\n".join(message["content"] for message in task.prompt)


@dataclass(frozen=True, slots=True)
class Case:
    """One task to probe. In a multi-turn task, only the last turn of the gold transcript is replaced.

    Attributes:
        gold: the gold answer without its form; None if the task has none.
        others: gold answers of the other probed tasks, without their form.
        gold_transcript: the gold answer with the turns before it.
        form: the form in which answers are written.
        pool: the gold answers of all other tasks, including tasks that are not probed, the most frequent
            first. If the pool has this task's gold answer, answers form a closed set.
        leaks: the patterns that find the right answer in the prompt of every task (`find_leaking_patterns`).
    """

    task: Task
    gold: str | None
    others: tuple[str, ...]
    gold_transcript: Transcript
    form: Form = BARE
    pool: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """The text of all opening messages."""
        return prompt_text(self.task)

    def transcript(self, text: str, finished: bool = True) -> Transcript:
        """Return the gold transcript with `text` as its last action."""
        return replace(self.gold_transcript, text=text, finished=finished)


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a probe.

    Attributes:
        rule: identifies the output among those of all probes; equal for the same rule on every task.
        answer: the transcript's answer, without the form.
    """

    case: Case
    probe: Probe
    rule: tuple[str, int, bool]
    answer: str
    transcript: Transcript


@dataclass(frozen=True, slots=True)
class Probe:
    """A rule that writes outputs.

    Attributes:
        kind: the quality of its outputs.
        uses_gold: whether the probe uses the gold answer, so that only a policy that can solve the task could
            write its outputs.
        write: the answers for a case, with the same rule at the same index for every case; empty if the probe
            does not apply.
        is_slow: whether it is tried on two tasks only, because its outputs are long or may make the scorer
            reach its time limit.
        is_whole: whether it writes whole outputs. Otherwise its answers are put into the case's form, and
            answers made without the gold answer are also tried without the form.
        reorders: whether its outputs may be right if the order of parts does not matter.
        finished: False to mark its outputs as cut off by the token limit.
    """

    name: str
    kind: OutputKind
    uses_gold: bool
    write: Callable[[Case, random.Random], Iterable[str]]
    is_slow: bool = False
    is_whole: bool = False
    reorders: bool = False
    finished: bool = True

    def outputs(self, case: Case, generator: random.Random) -> Iterator[Output]:
        written = list(self.write(case, generator))
        for is_wrapped in self._placements(case.form):
            for number, answer in enumerate(written):
                if answer == case.gold and self.finished and self.kind not in ("right", "copied"):
                    continue
                text = case.form.wrap(answer) if is_wrapped else answer
                rule = (self.name, number, is_wrapped)
                yield Output(case, self, rule, answer, case.transcript(text, self.finished))

    def _placements(self, form: Form) -> tuple[bool, ...]:
        if self.is_whole or form.is_bare:
            return (False,)
        return (True,) if self.uses_gold else (False, True)
