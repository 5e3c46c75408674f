"""Checks that an environment does not reveal the right answer after a wrong one and then reward it."""

import re
from collections.abc import Sequence
from contextlib import closing

from perilune.environments.core.protocol import Environment, Score, Transcript
from perilune.verifiers.audit.consistency import ScoreAll
from perilune.verifiers.audit.findings import Example
from perilune.verifiers.audit.judging import FULL_SHARE_WITHOUT_GOLD, Findings, Scored


def check_feedback(
    environment: Environment, golds: Sequence[Scored], score_all: ScoreAll, findings: Findings
) -> None:
    """Look for the right answer in the feedback on a wrong one. If it is there, score it as the next turn."""
    if getattr(environment, "max_turns", 1) == 1 or getattr(environment, "players", 1) > 1:
        return
    for gold in golds:
        case = gold.output.case
        for answer in dict.fromkeys(["0", *case.others[:1]]):
            wrong = case.form.wrap(answer)
            if case.gold and answer != case.gold and _reveals_gold(environment, gold, wrong):
                transcript = Transcript(
                    gold.output.transcript.text, earlier=(wrong,), seed=case.gold_transcript.seed
                )
                (outcome,) = score_all([(case, transcript)])
                reward = outcome.reward if isinstance(outcome, Score) else 0.0
                if reward >= FULL_SHARE_WITHOUT_GOLD * gold.full:
                    what = "a wrong answer is told the right one, which is then paid"
                    findings.add("answer in the feedback", "F", what, Example(case.task, transcript, reward))


def _reveals_gold(environment: Environment, gold: Scored, wrong: str) -> bool:
    """Return whether the messages after a wrong answer contain the right one, and the prompt does not."""
    case = gold.output.case
    try:
        with closing(environment.reset(case.task, case.gold_transcript.seed)) as session:
            observation = session.step(wrong)
    except Exception:  # a session that fails gives no feedback
        return False
    feedback = "\n".join(message["content"] for message in observation.messages)
    words = re.compile(rf"(?<!\w){re.escape((case.gold or '').strip(';= '))}(?!\w)")
    return not observation.done and bool(words.search(feedback)) and not words.search(case.prompt)
