"""The texts that an agent sees."""

from typing import Any, Literal

Style = Literal["natural", "compact"]
Mode = Literal["code", "calls"]

_FUNCTIONS = """\
search({query}k=10): the k documents that match a query best, the best first
fan_out({queries}k=10): the same for each query of a list, in one list of documents
filter({documents}words): the documents that have all these words
dedup({documents_only}): the documents without repetitions
rerank({documents}query, k): the documents, or the best k of them, ordered for another query
extract({documents}template): for each document that matches a template such as "seat in {{}}.", the text in
the place of {{}}"""
_CODE = """\
You answer a question about a corpus of {count} documents, which Python code can search. A document is a dict
with id, title and text. These functions are defined:
{functions}

Write one fenced block of Python and nothing after it; you are told what it prints. Variables keep their
values from block to block. Print only what you need. When you know the answer, write <answer>...</answer>.

{question}"""
_CALLS = """\
You answer a question about a corpus of {count} documents. You have these functions:
{functions}
filter, dedup, rerank and extract work on the documents that you saw last, or on those of them whose
numbers you give as documents=[...].

Write one call and nothing after it, like <tool_call>{{"name": "search", "arguments": {{"query": "...", "k":
5}}}}</tool_call>; you are told the result. When you know the answer, write <answer>...</answer>.

{question}"""


def render_opening(style: Style, mode: Mode, documents: int, question: str) -> str:
    """Return the first message: the size of the corpus, the functions, and the question."""
    if style == "compact":
        return question
    code = mode == "code"
    signatures = _FUNCTIONS.format(
        query="query, ",
        queries="queries, ",
        documents="documents, " if code else "",
        documents_only="documents" if code else "",
    )
    return (_CODE if code else _CALLS).format(count=documents, functions=signatures, question=question)


def render_list(style: Style, result: Any, max_chars: int) -> str:
    """Return a numbered list of what a single call returned, cut after `max_chars` characters."""
    items = result if isinstance(result, list) else [result]
    lines = [f"{number} {_render_item(style, item)}\n" for number, item in enumerate(items, 1)]
    text = "".join(lines)[:max_chars]
    return f"=\n{text}" if style == "compact" else text or "(nothing)"


def _render_item(style: Style, item: Any) -> str:
    if not isinstance(item, dict):
        return str(item)
    if style == "compact":
        return str(item["text"])
    return ": ".join(filter(None, (item["title"], item["text"])))
