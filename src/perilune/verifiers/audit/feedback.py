"""Checks that an environment does not tell the right answer after a wrong one, and then pay for it."""

import re
from collections.abc import Sequence
from contextlib import closing

from perilune.environments.core.protocol import Environment, Score, Transcript
from perilune.verifiers.audit.consistency import ScoreAll
from perilune.verifiers.audit.findings import Example
from perilune.verifiers.audit.judging import NEARLY, Findings, Scored


def check_feedback(
    environment: Environment, golds: Sequence[Scored], score_all: ScoreAll, findings: Findings
) -> None:
    """Try a wrong answer, look for the right one in what comes back, and have it scored.

    Args:
        golds: the scored right answers.
        score_all: scores items in order.
    """
    if getattr(environment, "max_turns", 1) == 1 or getattr(environment, "players", 1) > 1:
        return
    for one in golds:
        case = one.output.case
        for answer in dict.fromkeys(["0", *case.others[:1]]):
            wrong = case.form.wrap(answer)
            if case.gold and answer != case.gold and _tells(environment, one, wrong):
                tried = Transcript(one.output.transcript.text, earlier=(wrong,), seed=case.before.seed)
                (outcome,) = score_all([(case, tried)])
                paid = outcome.reward if isinstance(outcome, Score) else 0.0
                if paid >= NEARLY * one.full:
                    what = "a wrong answer is told the right one, which is then paid"
                    findings.add("answer in the feedback", "F", what, Example(case.task, tried, paid))


def _tells(environment: Environment, one: Scored, wrong: str) -> bool:
    """Return whether the messages after a wrong answer hold the right one, which the prompt does not."""
    case = one.output.case
    try:
        with closing(environment.reset(case.task, case.before.seed)) as session:
            seen = session.step(wrong)
    except Exception:  # a session that fails tells nothing
        return False
    told = "\n".join(message["content"] for message in seen.messages)
    words = re.compile(rf"(?<!\w){re.escape((case.gold or '').strip(';= '))}(?!\w)")
    return not seen.done and bool(words.search(told)) and not words.search(case.prompt)
