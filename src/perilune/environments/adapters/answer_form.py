"""The form an answer must have before a reasoning-gym scorer may see it.

Several scorers pass the answer to Python's `eval` or to sympy's `parse_expr`, which executes code. Others
give full or partial credit to text that is not an answer. The patterns here accept every right answer and
reject calls, attributes, strings and nested powers.
"""

import re
from functools import cache

_INTEGER = r"-?(?:0|[1-9]\d*|[1-9]\d{0,2}(?:,\d{3})+)"
_DECIMAL = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?"
_HEXADECIMAL = r"-?0x[0-9a-fA-F]{1,64}"
_FUNCTION = r"(?:exp|log|sqrt|sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh)(?=\()|E(?=\*\*\()"
_POWER = r"\*\*(?:\d{1,2}|\(-?\d{1,2}(?:/\d{1,2})?\)|(?<=E\*\*)(?=\())(?!\d|\*\*)"
_VARIABLE = r"[A-Za-z](?![A-Za-z(_])"
_NUMBER = r"\d{1,40}(?:\.\d{1,12})?(?![\d.])"
_SIGN = r"[-+/() ]|\*(?!\*)"


def _expression_pattern(*parts: str) -> str:
    return rf"(?>{'|'.join(parts)})++"  # atomic and possessive: never backtracks


# Families whose scorer evaluates the answer as code, so that only the pattern protects from it, and families
# whose scorer raises on unexpected text.
_PATTERNS: dict[str, str] = {
    "binary_matrix": r"\d(?:[ \n]\d)*+",
    "boxnet": r"[\[{].*[\]}]",
    "countdown": _expression_pattern(r"\d{1,6}(?!\d)", _SIGN),
    "game_of_life": r"\[[\d,\[\] \n]*\]",
    "intermediate_integration": _expression_pattern(_FUNCTION, _POWER, _NUMBER, _VARIABLE, _SIGN),
    "n_queens": r"[Q_](?:[ \n][Q_])*+",
    "polynomial_multiplication": _expression_pattern(_POWER, _NUMBER, _VARIABLE, _SIGN),
    "prime_factorization": r"\d{1,12}(?: ?[×x*] ?\d{1,12})*+",
    "puzzle24": _expression_pattern(r"\d{1,6}(?!\d)", _SIGN),
    "simple_integration": _expression_pattern(_POWER, _NUMBER, _VARIABLE, _SIGN),
    "spiral_matrix": r"-?\d++(?: -?\d++)*+",
    "string_insertion": r"[A-Z]++",
}

_CHOICES = (("true", "false"), ("yes", "no"))
_MAX_CHARS_WITHOUT_GOLD = 4096


def is_well_formed(family: str, answer: str, gold: str | None) -> bool:
    """Return whether `answer` has the form of a right answer of this reasoning-gym family.

    An integer must be written plainly (only a minus sign, no leading zeros), a number must be a number, and a
    choice must be one of the choices. Any other text must be printable and not much longer than the expected
    answer `gold`, if there is one.
    """
    max_chars = _MAX_CHARS_WITHOUT_GOLD if gold is None else 4 * len(gold) + 64
    if not answer or len(answer) > max_chars:
        return False
    if family in _PATTERNS:
        return _compile_pattern(_PATTERNS[family]).fullmatch(answer) is not None
    if gold is not None:
        for pattern in (_INTEGER, _HEXADECIMAL, _DECIMAL):
            if _compile_pattern(pattern).fullmatch(gold):
                return _compile_pattern(pattern).fullmatch(answer) is not None
        for choices in _CHOICES:
            if gold.lower() in choices:
                return answer.lower() in choices
    return all(character.isprintable() or character in "\n\t" for character in answer)


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.ASCII | re.DOTALL)
