"""The probes of an audit: rules that write outputs whose quality is known in advance.

A probe writes outputs for one task from its prompt, from the *gold* answer (the output of a policy that knows
the answer) if there is one, and from the gold answers of other tasks, which are wrong answers in the right
form. This module has the probes that need no gold answer, and the table of all probes.
"""

import random
import re
import string
from collections.abc import Sequence

from perilune.verifiers.audit import appeals, from_gold
from perilune.verifiers.audit.case import Case, Probe
from perilune.verifiers.audit.from_gold import apply_to_gold, join_answers
from perilune.verifiers.audit.known import is_number
from perilune.verifiers.audit.markers import CHUNKS, PATHS, split_items

LONG_OUTPUT_CHARS = 100_000  # characters of a very long output
MAX_LISTED_NUMBERS = 2_000  # largest number in a list of all numbers
MAX_LISTED_ANSWERS = 40  # most answers of other tasks in a list

_CONSTANTS = (
    *map(str, range(-1, 13)),
    *split_items("100; 0.5; yes; no; Yes; No; true; false; True; False"),
    *"ABCDEabcde",
    *split_items("None; null; nan; inf; -inf; 1e999; N/A; unknown; I don't know; infeasible"),
    *split_items('.; -; x; ?; *; .*; [0]; [[]]; {"0": 0}'),
)
_LISTS = (
    *split_items("yes no; Yes No; True False; true, false; yes or no; A B C D E; ABCDE; A, B, C, D"),
    *(string.ascii_lowercase, string.digits),
)
_EMPTY_TAGS = ("<answer></answer>", "<answer> </answer>")
_EMPTY_FORMS = (*_EMPTY_TAGS, "The answer is", "\\boxed{}", "```\n```", "[]", "{}", "()", '""')


def _write_echoes(case: Case, _: random.Random) -> list[str]:
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


def _write_skeletons(case: Case, _: random.Random) -> list[str]:
    """Return the form of an answer without its content."""
    if case.gold is None:
        return list(_EMPTY_FORMS)
    return [*_EMPTY_FORMS, *(re.sub(r"[^\W_]", letter, case.gold) for letter in ("", "x", "0", "1", "9"))]


def _write_all_answers(case: Case, *, each_in_form: bool = False) -> list[str]:
    """Write all answers of the pool, with the gold answer neither first nor last, where scorers may look."""
    if len(case.pool) < 2 or (each_in_form and case.form.is_bare):
        return []
    wrong = [answer for answer in case.pool if answer != case.gold][:MAX_LISTED_ANSWERS]
    middle = (len(wrong) + 1) // 2
    gold = [case.gold] if case.gold in case.pool and case.gold is not None else []
    answers = [*wrong[:middle], *gold, *(wrong[middle:] or wrong[:1])]
    listed = [case.form.wrap(answer) for answer in answers] if each_in_form else answers
    numbered = "\n".join(f"{number}. {answer}" for number, answer in enumerate(listed, start=1))
    return [*join_answers(listed), " and ".join(listed), "; ".join(listed), numbered]


def _write_answer_lists(case: Case, _: random.Random) -> list[str]:
    """Write many candidates: all numbers of similar size, all choices, the answers to other tasks."""
    numbers = [float(text.replace(",", "")) for text in (*case.others, case.gold or "") if is_number(text)]
    largest = min(MAX_LISTED_NUMBERS, 2 * int(max(map(abs, numbers), default=50)))
    number_lists = join_answers([str(number) for number in range(largest + 1)])
    others = join_answers(case.others) if len(case.others) > 1 else []
    return [*number_lists, " ".join(map(str, range(-20, 101))), *_LISTS, *others]


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
    "x" * LONG_OUTPUT_CHARS,
    "1" * LONG_OUTPUT_CHARS,
    "word " * (LONG_OUTPUT_CHARS // 5),
)


PROBES: Sequence[Probe] = (
    Probe("padded gold", "equivalent", True, apply_to_gold(from_gold.append_whitespace), is_whole=True),
    Probe("empty", "wrong", False, lambda case, _: [""]),
    Probe("whitespace", "wrong", False, lambda case, _: _BLANKS),
    Probe("constant", "unknown", False, lambda case, _: _CONSTANTS),
    Probe("prompt echo", "unknown", False, _write_echoes),
    Probe("format only", "unknown", False, _write_skeletons),
    Probe("answer list", "unknown", False, _write_answer_lists),
    Probe("all answers", "enumerated", False, lambda case, _: _write_all_answers(case)),
    Probe(
        "all answers in form",
        "enumerated",
        False,
        lambda case, _: _write_all_answers(case, each_in_form=True),
        is_whole=True,
    ),
    Probe("another task's answer", "unknown", False, lambda case, _: case.others[:8]),
    Probe("markers", "wrong", False, lambda case, _: list(CHUNKS.values()), is_whole=True),
    Probe("path", "wrong", False, lambda case, _: PATHS),
    Probe("prompt injection", "wrong", False, appeals.write_table(appeals.ORDERS)),
    Probe("prompt injection after a wrong answer", "unknown", False, appeals.write_orders_after_wrong_answer),
    Probe("persuasion", "unknown", False, appeals.write_claims),
    Probe("opening words", "unknown", False, appeals.write_table(appeals.OPENINGS)),
    Probe("refusal", "unknown", False, appeals.write_table(appeals.REFUSALS)),
    Probe("lookup of the answer", "unknown", False, appeals.write_table(appeals.LOOKUPS)),
    Probe("answer in the prompt", "copied", False, appeals.write_copies),
    Probe("code", "wrong", False, lambda case, _: _CODE, is_slow=True),
    Probe("very long", "wrong", False, lambda case, _: _BOMBS, is_slow=True),
    Probe("changed gold", "unknown", True, apply_to_gold(from_gold.change_character)),
    Probe("shortened gold", "unknown", True, apply_to_gold(from_gold.shorten)),
    Probe("reordered gold", "unknown", True, apply_to_gold(from_gold.reorder), reorders=True),
    Probe("another number", "unknown", True, apply_to_gold(from_gold.write_other_numbers)),
    Probe("hedged gold", "listed", True, apply_to_gold(from_gold.write_lists)),
    Probe("several answers", "listed", True, apply_to_gold(from_gold.write_marked_lists), is_whole=True),
    Probe("gold with more", "unknown", True, apply_to_gold(from_gold.append_text)),
    Probe(
        "gold with filler",
        "filled",
        True,
        apply_to_gold(from_gold.prepend_filler),
        is_slow=True,
        is_whole=True,
    ),
    Probe("gold in another script", "unknown", True, apply_to_gold(from_gold.change_script)),
    Probe("lookalike gold", "unknown", True, apply_to_gold(from_gold.write_lookalikes)),
    Probe("code for gold", "unknown", True, apply_to_gold(from_gold.write_code)),
    Probe("cut off gold", "wrong", True, apply_to_gold(lambda gold, case, _: [gold]), finished=False),
)
GOLD = Probe("gold", "right", True, apply_to_gold(lambda gold, case, _: [gold]))
