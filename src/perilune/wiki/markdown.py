"""The parts of a page: citations, hand-written regions, front matter, links, and quoted text."""

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from perilune.files import sha256_bytes
from perilune.terminal import escape_control

HAND_BEGIN, HAND_END = "<!-- hand -->", "<!-- /hand -->"
_REGION = re.compile(rf"{re.escape(HAND_BEGIN)}\n(.*)\n?{re.escape(HAND_END)}", re.DOTALL)
CITATION = re.compile(
    r"<!--= (?P<filled>[^<>\n]+?) -->(?P<shown>.*?)<!--/-->|\{\{(?P<source>[^{}<>\n]+?)\}\}"
)
LINK = re.compile(r"\[\[(?P<wiki>[^\]|#\n]+)[^\]\n]*\]\]|\]\((?P<path>[^)\s:#]+\.md)[^)\s]*\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FRONT = re.compile(r"---\n(.*?)\n---\n", re.DOTALL)
MAX_QUOTED_CHARACTERS = 200  # characters of quoted text


@dataclass(frozen=True, slots=True)
class Citation:
    """A query in a page.

    Attributes:
        shown: the number that the page shows; None before the first build.
        place, end: offsets in the text.
    """

    query: str
    shown: str | None
    place: int
    end: int


def quote(text: str) -> str:
    """Return untrusted text as inline code, so that its links, citations and table borders have no effect."""
    flat = " ".join(escape_control(text).split())[:MAX_QUOTED_CHARACTERS]
    return f"`{neutralize(flat).replace('`', chr(39)).replace('|', '¦')}`" if flat else ""


def neutralize(text: str) -> str:
    """Return untrusted text in which comments, citations and links have no effect."""
    for special in ("<!--", "-->", "{{", "[[", "]("):
        text = text.replace(special, f"{special[0]} {special[1:]}")
    return text


def make_slug(text: str) -> str:
    """Return a file name for a name from a recipe or a question; different names stay different."""
    plain = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-")[:60] or "page"
    return plain if plain == text else f"{plain}-{sha256_bytes(text.encode())[:6]}"


def render_citation(query: str, shown: str) -> str:
    """Return a citation as a built page contains it: the query in a comment, then the number."""
    return f"<!--= {query} -->{shown}<!--/-->"


def find_citations(text: str) -> Iterator[Citation]:
    """Yield the citations of a text that are not in code."""
    for match in CITATION.finditer(blank_code(text)):
        whole = CITATION.match(text, match.start())  # the number may contain code
        if whole is not None:
            yield Citation((whole["filled"] or whole["source"]).strip(), whole["shown"], *whole.span())


def fill_citations(text: str, answer: Callable[[str], str | None]) -> str:
    """Return the text with the number of each citation; citations without an answer stay as they are."""
    parts, offset = [], 0
    for citation in find_citations(text):
        number = answer(citation.query)
        if number is not None:
            parts += [text[offset : citation.place], render_citation(citation.query, number)]
            offset = citation.end
    return "".join([*parts, text[offset:]])


def strip_comments(text: str) -> str:
    """Return the text as readers see it, without comments."""
    return _COMMENT.sub("", text)


def blank_code(text: str) -> str:
    """Return the text with code replaced by spaces, so that offsets stay."""
    return CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def find_links(text: str, page: str) -> Iterator[tuple[str, int]]:
    """Yield the pages that a text links to, as paths in the wiki without `.md`, and the offset of each link.

    Args:
        page: path of the page; `[[links]]` are relative to the wiki, `](links.md)` to the page.
    """
    for match in LINK.finditer(blank_code(text)):
        name = (match["wiki"] or posixpath.join(posixpath.dirname(page), match["path"] or "")).strip()
        yield posixpath.normpath(name).removesuffix(".md"), match.start()


def hand_text(page: str) -> str:
    """Return the hand-written text of a page; all of a page that was not built yet."""
    start, end = hand_span(page)
    return page[start:end].strip()


def hand_span(page: str) -> tuple[int, int]:
    """Return begin and end of the hand-written text."""
    if not is_built(page):
        return 0, len(page)
    match = _REGION.search(page)
    return match.span(1) if match else (len(page), len(page))


def is_built(page: str) -> bool:
    """Return whether a build made the page."""
    return "generated" in read_front_matter(page)


def is_edited(page: str) -> bool:
    """Return whether the generated text of a built page was changed."""
    front = read_front_matter(page)
    return "generated" in front and front["generated"] != generated_digest(strip_front_matter(page))


def render_page(front: Mapping[str, Any], head: str, hand: str, tail: str) -> str:
    """Return a page: front matter, generated text around the hand-written region."""
    body = f"{head.rstrip()}\n\n{HAND_BEGIN}\n{hand}\n{HAND_END}\n" + (f"\n{tail.rstrip()}\n" if tail else "")
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()]
    return "\n".join(["---", *lines, f"generated: {json.dumps(generated_digest(body))}", "---", body])


def read_front_matter(page: str) -> dict[str, Any]:
    """Return the front matter that a build wrote; empty for other pages."""
    match = _FRONT.match(page)
    document = {}
    for line in match[1].splitlines() if match else ():
        key, _, value = line.partition(": ")
        try:
            document[key] = json.loads(value)
        except ValueError:
            return {}
    return document


def strip_front_matter(page: str) -> str:
    match = _FRONT.match(page)
    return page[match.end() :] if match else page


def generated_digest(body: str) -> str:
    """Return the SHA-256 of the generated text of a page: all but the hand-written region."""
    return sha256_bytes(_REGION.sub(HAND_BEGIN, body).encode())
