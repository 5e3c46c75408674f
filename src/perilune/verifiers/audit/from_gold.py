"""Outputs made from the gold answer: changed, shortened, reordered, in a list, in other characters."""

import json
import math
import random
import re
import string
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal, localcontext

from perilune.verifiers.audit.case import Case, Output
from perilune.verifiers.audit.known import is_number
from perilune.verifiers.audit.markers import CHUNKS


def apply_to_gold(
    write: Callable[[str, Case, random.Random], Iterable[str]],
) -> Callable[[Case, random.Random], Iterable[str]]:
    """Apply `write` to the gold answer, if there is one."""
    return lambda case, generator: [] if case.gold is None else write(case.gold, case, generator)


def change_character(gold: str, _: Case, generator: random.Random) -> list[str]:
    """Return the gold answer with one digit, one lowercase or one uppercase letter changed."""
    return [
        _advance_character(gold, str.isdigit, string.digits, generator),
        _advance_character(gold, str.islower, string.ascii_lowercase, generator),
        _advance_character(gold, str.isupper, string.ascii_uppercase, generator),
    ]


def _advance_character(gold: str, kind: Callable[[str], bool], letters: str, generator: random.Random) -> str:
    indices = [index for index, letter in enumerate(gold) if letter.isascii() and kind(letter)]
    if not indices:
        return gold
    index = generator.choice(indices)
    letter = letters[(letters.index(gold[index]) + 1) % len(letters)]
    return gold[:index] + letter + gold[index + 1 :]


def shorten(gold: str, _: Case, __: random.Random) -> list[str]:
    """Return parts of the gold answer; the whole answer in place of a part that has all its letters."""
    lines, words, half = gold.splitlines(), gold.split(" "), len(gold) // 2
    three_quarters = -(-len(gold) * 3 // 4)
    short = [gold[1:], gold[:-1], gold[:half], gold[half:], gold[:three_quarters], gold[:1], gold[-1:]]
    short += [
        "\n".join(lines[:-1]) if len(lines) > 1 else gold,
        " ".join(words[:-1]) if len(words) > 2 else gold,
    ]
    letters = re.sub(r"\W", "", gold)
    return [text if text.strip() and re.sub(r"\W", "", text) != letters else gold for text in short]


def reorder(gold: str, _: Case, generator: random.Random) -> list[str]:
    """Return the gold answer with its characters, words or lines in another order."""
    index = generator.randrange(len(gold) - 1) if len(gold) > 1 else 0
    swapped = gold[:index] + gold[index + 1 : index + 2] + gold[index : index + 1] + gold[index + 2 :]
    lines, words = gold.splitlines(), gold.split(" ")
    by_character = [gold[::-1], "".join(sorted(gold)), "".join(sorted(gold, reverse=True))]
    by_word = " ".join(reversed(words)) if len(words) > 2 else gold
    return [swapped, *by_character, gold[1:] + gold[:1], "\n".join(reversed(lines)), by_word]


def write_other_numbers(gold: str, _: Case, __: random.Random) -> list[str]:
    """Return numbers that resemble the gold answer: close to it, or with equal digits or remainders."""
    if not is_number(gold):
        return []
    with localcontext(prec=120):
        return _list_near_numbers(gold)


def _list_near_numbers(gold: str) -> list[str]:
    value = Decimal(gold.strip().replace(",", ""))
    unit = Decimal(1).scaleb(int(value.as_tuple().exponent))
    common = unit * math.lcm(*range(1, 61))  # keeps the remainder modulo every number up to 60
    digits = str(abs(value))
    percents = (1, -1, 5, -5, 10, -10, 20, 50, -50)
    return [
        *(f"{value + step * unit:f}" for step in (1, -1, 2, -2, 3, 5, 7, 9, 10, 11, 100, 1000)),
        f"{value + common:f}",
        *(f"{(value * (100 + percent) / 100).quantize(unit):f}" for percent in percents),
        *(f"{value * factor:f}" for factor in (2, 10, 100, 1000, -1)),
        *(f"{lead}{digits}" for lead in ("1", "9", "12")),
        *(f"{digits}{tail}" for tail in ("0", "5", "99")),
        f"{value:f}.5" if unit == 1 else f"{value.to_integral_value():f}",
    ]


def append_text(gold: str, _: Case, __: random.Random) -> list[str]:
    repeated = [f"{gold}{gold}", f"{gold} {gold}", f"{gold}\n" * 2000]
    return [f"{gold} or not", f"not {gold}", *repeated, f"x{gold}", f"{gold}x", f"{gold} is wrong"]


_SEPARATORS = (" ", "\n", ", ", " or ")


def write_lists(gold: str, case: Case, _: random.Random) -> list[str]:
    """Return the gold answer among wrong ones."""
    return [text for answers in _mix_with_wrong(gold, case) for text in join_answers(answers)]


def write_marked_lists(gold: str, case: Case, _: random.Random) -> list[str]:
    """Return the gold answer in its form among wrong ones in theirs."""
    if case.form.is_bare:
        return []
    return [
        text
        for answers in _mix_with_wrong(gold, case)
        for text in join_answers([case.form.wrap(answer) for answer in answers])
    ]


def join_answers(answers: Sequence[str]) -> list[str]:
    return [*(joint.join(answers) for joint in _SEPARATORS), json.dumps(list(answers), ensure_ascii=False)]


def position_in_list(output: Output) -> int:
    """Return the position of the gold answer in a list: 0 first, 1 in the middle, 2 last."""
    return output.rule[1] // len(join_answers([]))


def _mix_with_wrong(gold: str, case: Case) -> list[list[str]]:
    wrong = [other for other in case.others if other != gold][:6]
    middle = len(wrong) // 2
    return [[gold, *wrong], [*wrong[:middle], gold, *wrong[middle:]], [*wrong, gold]] if wrong else []


_SCRIPT_LETTERS = str.maketrans("aceopxyABEHKMOPTX", "асеорхуАВЕНКМОРТХ")  # Latin to Cyrillic
_ARABIC_DIGITS = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
_DEVANAGARI_DIGITS = str.maketrans("0123456789", "०१२३४५६७८९")
_FULL_WIDTH = str.maketrans({chr(code): chr(code + 0xFEE0) for code in range(0x21, 0x7F)})


def change_script(gold: str, _: Case, __: random.Random) -> list[str]:
    return [gold.translate(table) for table in (_SCRIPT_LETTERS, _ARABIC_DIGITS, _DEVANAGARI_DIGITS)]


def write_lookalikes(gold: str, _: Case, __: random.Random) -> list[str]:
    """Return the gold answer in characters that look the same, or with invisible characters."""
    middle = len(gold) // 2
    return [gold.translate(_FULL_WIDTH), gold[:middle] + "\u200b" + gold[middle:], "\u202e" + gold]


def write_code(gold: str, _: Case, __: random.Random) -> list[str]:
    """Return Python code that computes the gold answer, for scorers that evaluate their input."""
    written = [f"eval({gold!r})", f"str({gold!r})", f"(lambda: {gold!r})()", f"[{gold!r}][0]"]
    number = re.fullmatch(r"-?\d{1,12}", gold, re.ASCII)
    return [*written, f"int('{gold}')" if number else gold, f"{gold}*len('x')" if number else gold]


def prepend_filler(gold: str, case: Case, _: random.Random) -> list[str]:
    """Return the gold answer after filler."""
    return [f"{chunk}\n{case.form.wrap(gold)}" for chunk in (*CHUNKS.values(), "word " * 2000)]


def append_whitespace(gold: str, case: Case, _: random.Random) -> list[str]:
    """Return the gold answer with trailing whitespace."""
    return [case.form.wrap(gold) + "\n", case.form.wrap(gold) + " "]
