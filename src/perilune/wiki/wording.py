"""Finds figures, comparisons and superlatives in English sentences.

The rules are patterns of words, chosen so that ordinary sentences seldom match: a comparison that they miss
does less harm than findings that people learn to ignore.
"""

import re
from collections.abc import Iterator

_MEASURED = (  # what a result measures
    r"(?:accuracy|pass rate|pass@\d+|success rate|win rate|error rate|reward|score|loss|perplexity|return"
    r"|throughput|speed|performance|quality|results?)"
)
_WHOSE = r"(?:(?:the|its|their|our|mean|final|held-out)\s+)*"
_DEGREE = r"(?:(?:much|far|clearly|slightly|significantly|consistently|even|also|no|not)\s+)*"
_NOT_ADJECTIVES = (  # words before "than" that compare no results, though they end in -er
    r"(?:rather|other|another|further|older|newer|later|earlier|longer|shorter|larger|smaller|bigger|greater)"
)
_CHANGED = r"(?:doubles|doubled|halves|halved|triples|tripled|quadruples|quadrupled)"
_COMPARISON = re.compile(
    r"\b(?:"
    r"(?:better|worse|higher|lower|faster|slower|superior|inferior)\s+(?:than|to\s+(?:the|both|all|any)\b)"
    r"|beats?|outperform(?:s|ed)?|surpass(?:es|ed)|outscore[sd]?"
    r"|(?:more|less|fewer)\s+(?!often\s+than\s+not)(?:[\w-]+\s+){1,2}than"
    rf"|(?:is|are|was|were|becomes?|became|gets?|got)\s+{_DEGREE}(?!{_NOT_ADJECTIVES}\b)[a-z]{{2,}}er\s+than"
    r"|improve[sd]\s+(?:on|upon|over)"
    rf"|{_CHANGED}\s+{_WHOSE}{_MEASURED}"
    rf"|{_MEASURED}\s+(?:has\s+|have\s+|is\s+|was\s+)?{_CHANGED}"
    r"|(?:twice|half|three\s+times|\d+(?:\.\d+)?\s?[x×])\s+as\s+\w+\s+as"
    r")\b",
    re.I,
)
_SUPERLATIVE = re.compile(
    r"\b(?:"
    r"best(?!-|\s+of\b)|strongest|state\s+of\s+the\s+art"
    r"|(?:has|had|gives?|gave|reach(?:es|ed)|gets?|got|achieve[sd]?|show(?:s|ed))\s+the\s+(?:highest|lowest)"
    rf"|the\s+(?:highest|lowest)\s+{_MEASURED}\s+(?:comes?|came|is|was)"
    r")\b",
    re.I,
)
_CLAIM = re.compile(
    r"\b(?:better|worse|beats?|outperforms?|improv\w+|raises?|raised|higher|lower|faster|slower|gains?|wins?)\b",
    re.I,
)
# Before a comparison, these words make it a question, a plan or a doubt.
_DOUBT = re.compile(
    r"\b(?:whether|if|unless|may(?!\s+\d)|might|could|would|should|expect\w*|suppose|hypothes[ie]s|unclear|unknown"
    r"|to be (?:tested|seen|shown)|maybe|perhaps)\b",
    re.I,
)

_UNIT = r"(?:\s?%|\s?‰|(?:k|K|x|×|pp|pts?|ms|s|min|h|kB|MB|GB|TB|[KMG]iB)(?![\w@/]))"
_NUMBER = re.compile(
    r"(?<![\w.@/#=-])[-+−]?"
    r"(?:\d+(?:\.\d+)?/\d+(?:\.\d+)?(?![\w/])"  # a fraction or a ratio
    rf"|\d+(?:[.,]\d+)*(?:[eE][-+−]?\d+)?{_UNIT}?(?![\w@/]|\.\d))"
)
_LABEL = (
    r"(?:seed|step|page|figure|fig|table|equation|eq|issue|section|chapter|appendix|version|line|row|column)"
)
_MONTH = r"(?:January|February|March|April|May|June|July|August|September|October|November|December)"
_AFTER_LABEL = r"\d+(?:\.\d+)*(?!\d|\s?%)"
_NOT_FIGURES = re.compile(
    r"^# .*$|^[ \t]*\d+[.)][ \t]|https?://\S+"
    r"|\b\d{4}-\d\d-\d\d\b|\b\d{4}/\d\d/\d\d\b|\barXiv[: ]?\d{4}\.\d+"
    rf"|\b(?:\d\d?\s+)?{_MONTH}(?:\s+\d\d?,)?\s+\d{{4}}\b|\b(?:in|since|until)\s+(?:19|20)\d\d(?=[.,;:)]|$)"
    rf"|\b{_LABEL}\.?\s+{_AFTER_LABEL}"
    rf"|\b{_LABEL}s\.?\s+{_AFTER_LABEL}(?:(?:,\s|,?\s+and\s|\s+to\s|[-–]){_AFTER_LABEL})*"
    r"|§\s?\d+(?:\.\d+)*|\b(?:Python|PyTorch|torch|CUDA)\s+\d+(?:\.\d+)*"
    r"|\b\d+-(?:bit|layer|head|token|step|shot|turn|player|digit|way|gram|dimensional)\b|\b24/7\b",
    re.M | re.I,
)


def is_superlative(sentence: str) -> bool:
    """Return whether a sentence says that something is the best."""
    return _asserts(_SUPERLATIVE, sentence)


def is_comparison(sentence: str) -> bool:
    """Return whether a sentence says that one thing has better results than another."""
    return _asserts(_COMPARISON, sentence)


def is_claim(sentence: str) -> bool:
    """Return whether a sentence compares in any way, so that figures in it need enough seeds."""
    if sentence.rstrip().endswith("?"):
        return False
    return any(pattern.search(sentence) for pattern in (_CLAIM, _COMPARISON, _SUPERLATIVE))


def find_figures(text: str) -> Iterator[re.Match[str]]:
    """Yield the numbers of a text, except for dates, versions, and numbers of sections and the like."""
    return _NUMBER.finditer(_NOT_FIGURES.sub(lambda found: " " * len(found[0]), text))


def _asserts(pattern: re.Pattern[str], sentence: str) -> bool:
    """Return whether a pattern occurs in a sentence that is no question, before any word of doubt."""
    found = pattern.search(sentence)
    if found is None or sentence.rstrip().endswith("?"):
        return False
    return _DOUBT.search(sentence, 0, found.start()) is None
