"""Lines, questions and answers in a few characters, for character-level models.

c3bo                    a line: month from a to l, user, and a word that decides the label

#A                      how many lines have label A?
+  -                    which label has most, or fewest, lines?
A?B                     has A more lines than B (>), fewer (<) or as many (=)?
@A  %A                  which user, which month has most lines of A?
&A2                     which pairs of users have 2 or more lines of A each?
&A2B                    in which pairs has one user 2 or more lines of A, and the other of B?
&A=2                    which pairs have the same number of lines of A, at least 2?
&A+7                    which pairs, where both have lines of A, have 7 together?
#&A2                    how many such pairs are there?
#A@3 #A<e #A>e #A=e     of user 3; before month e; from month e on; in month e

;2 ;A ;> ;e ;1-4,2-3    answers; any text without ";" may precede
"""

from perilune.environments.builtin.oolong.questions import AFTER_ALL, BEFORE_ALL, Question
from perilune.environments.builtin.oolong.records import Record

ANSWER_MARK = ";"
PAIR_SEPARATOR = ","
LABELS = tuple("ABCDEF")
SIGNS = {1: ">", -1: "<", 0: "="}
WORDS = tuple(
    tuple(words.split())
    for words in (
        "du fe go ke ko mi ni pe",
        "he ki le ma mo pa po pu",
        "bi bu fi fu gi gu ha ka",
        "ba da do fo li lu me no",
        "bo de di fa ho hu la na",
        "be ga hi ku lo ne nu pi",
    )
)
"""The words of each label, drawn at random. No letter occurs in the words of one label alone."""


def render_line(record: Record) -> str:
    words = WORDS[record.label]
    return f"{render_month(record.date // 100)}{record.user}{words[record.wording % len(words)]}"


def count_tokens(text: str) -> int:
    """Return the tokens of a line: one a character."""
    return len(text) + 1


def render_month(number: int) -> str:
    return chr(ord("a") + number - 1)


def render_question(question: Question) -> str:
    label, other = LABELS[question.label], LABELS[question.other]
    if question.find in ("pairs", "pairs_count"):
        number = question.number
        condition = {
            "both": f"{number}",
            "each": f"{number}{other}",
            "equal": f"={number}",
            "sum": f"+{number}",
        }
        text = f"{'#' * (question.find == 'pairs_count')}&{label}{condition[question.relation]}"
    else:
        forms = {"count": f"#{label}", "most": "+", "least": "-", "user": f"@{label}", "month": f"%{label}"}
        text = f"{label}?{other}" if question.find == "compare" else forms[question.find]
    return text + (f"@{question.user}" if question.user else "") + _render_period(question)


def _render_period(question: Question) -> str:
    since, until = render_month(question.since // 100), render_month(question.until // 100)
    if question.since > BEFORE_ALL:
        return f">{since}" if question.until == AFTER_ALL else f"={since}"
    return "" if question.until == AFTER_ALL else f"<{until}"


def read_field(text: str) -> str | None:
    """Return the answer after the only mark; None if there is no single mark."""
    return text.partition(ANSWER_MARK)[2] if text.count(ANSWER_MARK) == 1 else None


def render_prompt(lines: str, question: str) -> str:
    return f"{lines}{question}\n"
