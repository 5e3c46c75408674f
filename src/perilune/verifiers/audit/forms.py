"""The form in which a scorer expects an answer: alone, in tags, in a box, after a label, in JSON.

A data set often has bare answers, but many scorers look for answers in a form. The audit finds the form: the
common prefix and suffix of all gold answers, or else the form with the highest reward among the usual forms
and the forms that the prompt shows.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """The text before and after an answer.

    Attributes:
        stated: whether the environment's gold answers have this form. If so, the second opinion expects it.
    """

    before: str = ""
    after: str = ""
    stated: bool = False

    @property
    def is_bare(self) -> bool:
        """True if the form adds nothing to an answer."""
        return not (self.before or self.after)

    def wrap(self, answer: str) -> str:
        return f"{self.before}{answer}{self.after}"

    def unwrap(self, text: str) -> str:
        return text[len(self.before) : len(text) - len(self.after)]


BARE = Form()
FORMS: Sequence[Form] = (
    Form("\\boxed{", "}"),
    Form("<answer>", "</answer>"),
    Form("<think>\nx\n</think>\n<answer>\n", "\n</answer>"),
    Form("<think>x</think>\n<answer>", "</answer>"),
    Form("<think>\nx\n</think>\n"),
    Form("<think>\nx\n</think>\n\\boxed{", "}"),
    Form("<reasoning>\nx\n</reasoning>\n<answer>\n", "\n</answer>\n"),
    Form("#### "),
    Form("The answer is "),
    Form("The final answer is ", "."),
    Form("Answer: "),
    Form("Final answer: "),
    Form("$", "$"),
    Form("$\\boxed{", "}$"),
    Form('{"answer": "', '"}'),
    Form('{"answer": ', "}"),
    Form("```\n", "\n```"),
)
_FORM_START = re.compile(r".*[>{:#$]\s*", re.DOTALL)


def find_stated_form(golds: Sequence[str]) -> Form:
    """Return the common prefix and suffix of gold answers, if the prefix ends like a tag, box or label."""
    if len(set(golds)) < 2:
        return BARE
    opening = _FORM_START.match(_common_prefix(golds))
    before = opening[0] if opening else ""
    after = _common_prefix([gold[len(before) :][::-1] for gold in golds])[::-1]
    after = re.sub(r"^[^<}$]*", "", after)
    return Form(before, after, stated=True) if before else BARE


def _common_prefix(texts: Sequence[str]) -> str:
    prefix = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in prefix)


def find_shown_forms(prompt: str) -> list[Form]:
    """Return the forms that a prompt shows: its tags in order, with the answer in the last tag."""
    names = list(dict.fromkeys(re.findall(r"<([A-Za-z_][\w-]{0,30})>", prompt)))
    forms = []
    for gap in ("", "\n"):
        earlier = "".join(f"<{name}>{gap}x{gap}</{name}>{gap}" for name in names[:-1])
        forms += [Form(f"{earlier}<{name}>{gap}", f"{gap}</{name}>") for name in names[-1:]]
    return forms
