"""Searches for wrong outputs with a high reward."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perilune.environments.core.protocol import Outcome, Score
from perilune.verifiers.audit.case import Case

GENERATION_SIZE = 24  # outputs scored together
PARENT_COUNT = 8  # outputs of each origin that survive a generation
MAX_CHARS = 400  # longest output; keeps outputs from growing without end
FULL_SHARE = 0.999  # share of the gold output's reward that counts as full


@dataclass(frozen=True, slots=True)
class WrongOutput:
    """A wrong output, its reward, and whether the gold output is among its ancestors."""

    text: str
    reward: float
    uses_gold: bool


def search_wrong_outputs(
    case: Case,
    score: Callable[[Sequence[str]], Sequence[Outcome]],
    is_right: Callable[[str], bool | None],
    *,
    full: float,
    budget: int,
    generator: random.Random,
) -> tuple[list[WrongOutput], int]:
    """Evolve answers from wrong ones and from the gold one, keeping wrong answers with a high reward.

    Args:
        score: the scorer under audit, for answers without their form.
        is_right: the second opinion. Only answers that it calls wrong count.
        full: reward of the gold output. The search ends when wrong outputs of both origins get this reward.
        budget: number of outputs after which the search ends.

    Returns:
        For each origin (without and with the gold output among the ancestors) the wrong output with the
        highest reward, if any got a reward; and the number of outputs tried, including repeated ones.
    """
    pool = [WrongOutput(text, 0.0, False) for text in ("", "0", *case.others[:6])]
    if case.gold is not None:
        pool.append(WrongOutput(case.gold, 0.0, True))
    letters = sorted(set("".join([*case.others, case.gold or "", "0 1x,-"])))
    tried = {output.text for output in pool}
    best: dict[bool, WrongOutput] = {}
    tried_count = 0
    while tried_count < budget and not _is_finished(best, full, case):
        children = [_mutate(pool, letters, generator) for _ in range(GENERATION_SIZE)]
        fresh = [child for child in children if child.text not in tried and len(child.text) <= MAX_CHARS]
        tried.update(child.text for child in fresh)
        tried_count += len(children)
        for child, outcome in zip(fresh, score([child.text for child in fresh]), strict=True):
            if not isinstance(outcome, Score) or is_right(child.text) is not False:
                continue
            output = WrongOutput(child.text, outcome.reward, child.uses_gold)
            pool.append(output)
            if output.reward > max(0.0, best[output.uses_gold].reward if output.uses_gold in best else 0.0):
                best[output.uses_gold] = output
        pool = _select_survivors(pool, generator)
    return [best[uses_gold] for uses_gold in sorted(best)], tried_count


def _is_finished(best: dict[bool, WrongOutput], full: float, case: Case) -> bool:
    origins = (False,) if case.gold is None else (False, True)
    return all(origin in best and best[origin].reward >= FULL_SHARE * full for origin in origins)


def _select_survivors(pool: list[WrongOutput], generator: random.Random) -> list[WrongOutput]:
    """Return the best outputs of each origin, among equals the shorter ones, and some random others."""
    ranked = sorted(pool, key=lambda output: (-output.reward, len(output.text)))
    by_origin = [[output for output in ranked if output.uses_gold is origin] for origin in (False, True)]
    parents = by_origin[0][:PARENT_COUNT] + by_origin[1][:PARENT_COUNT]
    others = [output for output in pool if output not in parents]
    return parents + generator.sample(others, min(PARENT_COUNT, len(others)))


def _mutate(pool: Sequence[WrongOutput], letters: Sequence[str], generator: random.Random) -> WrongOutput:
    """Return a mutation of one output of the pool."""
    parent = generator.choice(pool)
    text, uses_gold = parent.text, parent.uses_gold
    for _ in range(generator.choice((1, 1, 2))):
        start, end = sorted((generator.randint(0, len(text)), generator.randint(0, len(text))))
        match generator.randrange(7):
            case 0:
                text = text[:start] + generator.choice(letters) + text[start:]
            case 1:
                text = text[:start] + text[end:]
            case 2:
                text = text[:end] + text[start:end] + text[end:]
            case 3:
                mate = generator.choice(pool)
                text += generator.choice(("", " ", "\n", ",")) + mate.text
                uses_gold |= mate.uses_gold
            case 4:
                opening, closing = generator.choice(("()", "[]", '""', "  ", "{}"))
                text = opening + text + closing
            case 5:
                text = text * generator.randint(2, 5)
            case _:
                text = text[:start] + generator.choice(letters) + text[start + 1 :]
    return WrongOutput(text, 0.0, uses_gold)
