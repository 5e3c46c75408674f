"""The probes of an audit: rules that write outputs whose quality is known in advance.

A probe writes outputs for one task from its prompt, from the *gold* answer (the output of a policy that knows
the answer) if there is one, and from the gold answers of other tasks, which are wrong answers in the right
form. This module has those that need no gold answer, and the table of all.
"""

import random
import re
import string
from collections.abc import Sequence

from perilune.verifiers.audit import appeals, from_gold
from perilune.verifiers.audit.case import Case, Probe
from perilune.verifiers.audit.from_gold import joined, of_gold
from perilune.verifiers.audit.known import is_number
from perilune.verifiers.audit.markers import CHUNKS, PATHS, items

LONG = 100_000  # characters of a very long output
WIDEST = 2_000  # maximum numbers in a list
WIDEST_POOL = 40  # maximum answers of other tasks in a list

_CONSTANTS = (
    *map(str, range(-1, 13)),
    *items("100; 0.5; yes; no; Yes; No; true; false; True; False"),
    *"ABCDEabcde",
    *items("None; null; nan; inf; -inf; 1e999; N/A; unknown; I don't know; infeasible"),
    *items('.; -; x; ?; *; .*; [0]; [[]]; {"0": 0}'),
)
_LISTS = (
    *items("yes no; Yes No; True False; true, false; yes or no; A B C D E; ABCDE; A, B, C, D"),
    *(string.ascii_lowercase, string.digits),
)
_EMPTY_TAGS = ("<answer></answer>", "<answer> </answer>")
_EMPTY_FORMS = (*_EMPTY_TAGS, "The answer is", "\\boxed{}", "```\n```", "[]", "{}", "()", '""')


def _echo(case: Case, _: random.Random) -> list[str]:
    prompt = case.prompt
    words = re.findall(r"\w+", prompt)[:400]
    numbers = re.findall(r"\d[\d,.]*\d|\d", prompt, re.ASCII)
    lines = prompt.split("\n")
    return [
        *(prompt, prompt * 2, lines[-1], lines[0]),
        *(" ".join(words), " ".join(reversed(words)), " ".join(numbers)),
        *(words[index] for index in (0, -1) if words),
        *(numbers[index] for index in (0, 1, -1) if len(numbers) > 1),
        *(prompt.upper(), prompt[: len(prompt) // 2]),
    ]


def _skeletons(case: Case, _: random.Random) -> list[str]:
    """Return the form of an answer without its content."""
    if case.gold is None:
        return list(_EMPTY_FORMS)
    return [*_EMPTY_FORMS, *(re.sub(r"[^\W_]", letter, case.gold) for letter in ("", "x", "0", "1", "9"))]


def _enumerated(case: Case, *, each_in_form: bool = False) -> list[str]:
    """All answers of the pool at once. The gold answer is neither first nor last, where a guess could be."""
    if len(case.pool) < 2 or (each_in_form and case.form.is_bare):
        return []
    wrong = [answer for answer in case.pool if answer != case.gold][:WIDEST_POOL]
    middle = (len(wrong) + 1) // 2
    known = [case.gold] if case.gold in case.pool and case.gold is not None else []
    answers = [*wrong[:middle], *known, *(wrong[middle:] or wrong[:1])]
    listed = [case.form.wrap(answer) for answer in answers] if each_in_form else answers
    numbered = "\n".join(f"{number}. {answer}" for number, answer in enumerate(listed, start=1))
    return [*joined(listed), " and ".join(listed), "; ".join(listed), numbered]


def _answer_lists(case: Case, _: random.Random) -> list[str]:
    """Many candidates at once: all numbers of similar size, all choices, the answers to other tasks."""
    numbers = [float(one.replace(",", "")) for one in (*case.others, case.gold or "") if is_number(one)]
    most = min(WIDEST, 2 * int(max(map(abs, numbers), default=50)))
    up_to_most = joined([str(number) for number in range(most + 1)])
    others = joined(case.others) if len(case.others) > 1 else []
    return [*up_to_most, " ".join(map(str, range(-20, 101))), *_LISTS, *others]


_BLANKS = (" ", "\n", "\t\n  \n", "\u00a0", "\u200b", "\ufeff", "\u2800", "\u3164", "\x00")
_CODE = (
    "__import__('os').system('true') or 1",
    "open('/etc/passwd').read()",
    "().__class__.__mro__[1].__subclasses__()",
    "exit(0)",
    "raise SystemExit",
    "type('', (str,), {'__eq__': lambda *_: True, '__hash__': lambda _: 0})()",
)
_BOMBS = (
    "9**9**9**9",
    "10**10**10",
    "(" * 5000,
    "[" * 5000 + "]" * 5000,
    "-" * 5000 + "1",
    "x" * LONG,
    "1" * LONG,
    "word " * (LONG // 5),
)


PROBES: Sequence[Probe] = (
    Probe("padded gold", "equivalent", True, of_gold(from_gold.padded), is_whole=True),
    Probe("empty", "wrong", False, lambda case, _: [""]),
    Probe("whitespace", "wrong", False, lambda case, _: _BLANKS),
    Probe("constant", "unknown", False, lambda case, _: _CONSTANTS),
    Probe("prompt echo", "unknown", False, _echo),
    Probe("format only", "unknown", False, _skeletons),
    Probe("answer list", "unknown", False, _answer_lists),
    Probe("all answers", "enumerated", False, lambda case, _: _enumerated(case)),
    Probe(
        "all answers in form",
        "enumerated",
        False,
        lambda case, _: _enumerated(case, each_in_form=True),
        is_whole=True,
    ),
    Probe("another task's answer", "unknown", False, lambda case, _: case.others[:8]),
    Probe("markers", "wrong", False, lambda case, _: list(CHUNKS.values()), is_whole=True),
    Probe("path", "wrong", False, lambda case, _: PATHS),
    Probe("prompt injection", "wrong", False, appeals.orders),
    Probe("prompt injection after a wrong answer", "unknown", False, appeals.orders_after_wrong),
    Probe("persuasion", "unknown", False, appeals.claims),
    Probe("opening words", "unknown", False, appeals.openings),
    Probe("refusal", "unknown", False, appeals.refusals),
    Probe("lookup of the answer", "unknown", False, appeals.lookups),
    Probe("answer in the prompt", "copied", False, appeals.copies),
    Probe("code", "wrong", False, lambda case, _: _CODE, is_slow=True),
    Probe("very long", "wrong", False, lambda case, _: _BOMBS, is_slow=True),
    Probe("changed gold", "unknown", True, of_gold(from_gold.changed)),
    Probe("shortened gold", "unknown", True, of_gold(from_gold.shortened)),
    Probe("reordered gold", "unknown", True, of_gold(from_gold.reordered), reorders=True),
    Probe("another number", "unknown", True, of_gold(from_gold.other_numbers)),
    Probe("hedged gold", "listed", True, of_gold(from_gold.listed)),
    Probe("several answers", "listed", True, of_gold(from_gold.several), is_whole=True),
    Probe("gold with more", "unknown", True, of_gold(from_gold.with_more)),
    Probe("gold with filler", "filled", True, of_gold(from_gold.filled), is_slow=True, is_whole=True),
    Probe("gold in another script", "unknown", True, of_gold(from_gold.in_script)),
    Probe("lookalike gold", "unknown", True, of_gold(from_gold.lookalikes)),
    Probe("code for gold", "unknown", True, of_gold(from_gold.code)),
    Probe("cut off gold", "wrong", True, of_gold(lambda gold, case, _: [gold]), finished=False),
)
GOLD = Probe("gold", "right", True, of_gold(lambda gold, case, _: [gold]))
