"""Functions of the search stack that need no index. The sandbox, too, runs this file."""

import re


def filter(documents: list[dict[str, str]], words: str) -> list[dict[str, str]]:
    """Return the documents that have all these words."""
    return [
        document
        for document in documents
        if {*_words(words)} <= {*_words(document["title"] + " " + document["text"])}
    ]


def dedup(documents: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the documents without repetitions: of texts with the same words, the first."""
    first: dict[str, dict[str, str]] = {}
    for document in documents:
        first.setdefault(" ".join(_words(document["text"])), document)
    return [*first.values()]


def extract(documents: list[dict[str, str]], template: str) -> list[str]:
    """Return the text at {} in the first match of each document that has one.

    extract(documents, "seat in {}.") ends at the full stop; what {} stands for has no punctuation.
    """
    before, mark, after = template.partition("{}")
    if not mark or "{}" in after:
        raise ValueError("the template of extract needs one {}")
    lazy = "?" if after else ""  # bounded, so that no text takes long
    pattern = re.compile(rf"{re.escape(before)}([^.,;:!?\n]{{1,200}}{lazy}){re.escape(after)}", re.IGNORECASE)
    return [match[1].strip() for document in documents if (match := pattern.search(document["text"]))]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
