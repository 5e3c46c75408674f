"""A search for the best-paid output that a second opinion rejects."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perilune.environments.core.protocol import Outcome, Score
from perilune.verifiers.audit.probes import Case

GENERATION = 24  # outputs judged together
PARENTS = 8
LONGEST = 400  # characters, so that a search does not end in the merely long
ENOUGH = 0.999  # of what the gold output gets


@dataclass(frozen=True, slots=True)
class Found:
    """A wrong output, what it was paid, and whether it descends from the gold output."""

    text: str
    reward: float
    knows: bool


def search(
    case: Case,
    judge: Callable[[Sequence[str]], Sequence[Outcome]],
    is_right: Callable[[str], bool | None],
    *,
    full: float,
    budget: int,
    generator: random.Random,
) -> tuple[list[Found], int]:
    """Breed answers from wrong ones and from the gold one, keeping the best-paid that are wrong.

    Args:
        judge: the scorer under audit, of answers without their form.
        is_right: what is known of an answer; only those that are known to be wrong count.
        full: reward of the gold output; a search that has found this much from both origins ends.
        budget: outputs to judge at most.

    Returns:
        the best-paid wrong output without and with the gold one among its ancestors, where any was paid; and
        how many outputs were judged.
    """
    pool = [Found(text, 0.0, False) for text in ("", "0", *case.others[:6])]
    if case.gold is not None:
        pool.append(Found(case.gold, 0.0, True))
    letters = sorted(set("".join([*case.others, case.gold or "", "0 1x,-"])))
    seen = {found.text for found in pool}
    best: dict[bool, Found] = {}
    judged = 0
    while judged < budget and not _enough(best, full, case):
        children = [_child(pool, letters, generator) for _ in range(GENERATION)]
        fresh = [child for child in children if child.text not in seen and len(child.text) <= LONGEST]
        seen.update(child.text for child in fresh)
        judged += len(children)
        for child, outcome in zip(fresh, judge([child.text for child in fresh]), strict=True):
            if not isinstance(outcome, Score) or is_right(child.text) is not False:
                continue
            found = Found(child.text, outcome.reward, child.knows)
            pool.append(found)
            if found.reward > max(0.0, best[found.knows].reward if found.knows in best else 0.0):
                best[found.knows] = found
        pool = _survivors(pool, generator)
    return [best[knows] for knows in sorted(best)], judged


def _enough(best: dict[bool, Found], full: float, case: Case) -> bool:
    origins = (False,) if case.gold is None else (False, True)
    return all(origin in best and best[origin].reward >= ENOUGH * full for origin in origins)


def _survivors(pool: list[Found], generator: random.Random) -> list[Found]:
    """The best of both origins, the shorter first, and some others so that the search does not narrow."""
    ranked = sorted(pool, key=lambda found: (-found.reward, len(found.text)))
    kept = [found for knows in (False, True) for found in [f for f in ranked if f.knows is knows][:PARENTS]]
    others = [found for found in pool if found not in kept]
    return kept + generator.sample(others, min(PARENTS, len(others)))


def _child(pool: Sequence[Found], letters: Sequence[str], generator: random.Random) -> Found:
    """One of the pool, changed once or twice."""
    parent = generator.choice(pool)
    text, knows = parent.text, parent.knows
    for _ in range(generator.choice((1, 1, 2))):
        place, end = sorted((generator.randint(0, len(text)), generator.randint(0, len(text))))
        match generator.randrange(7):
            case 0:
                text = text[:place] + generator.choice(letters) + text[place:]
            case 1:
                text = text[:place] + text[end:]
            case 2:
                text = text[:end] + text[place:end] + text[end:]
            case 3:
                mate = generator.choice(pool)
                text, knows = text + generator.choice(("", " ", "\n", ",")) + mate.text, knows or mate.knows
            case 4:
                opening, closing = generator.choice(("()", "[]", '""', "  ", "{}"))
                text = opening + text + closing
            case 5:
                text = text * generator.randint(2, 5)
            case _:
                text = text[:place] + generator.choice(letters) + text[place + 1 :]
    return Found(text, 0.0, knows)
