"""Writes llms.txt, llms-full.txt, and the Markdown of every page beside its HTML.

The format of llms.txt is that of https://llmstxt.org. A reference page takes docstrings from the source; here
they are read by griffe, as mkdocstrings does, and stand in the text.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import yaml

REFERENCE = re.compile(r"^::: (?P<path>[\w.]+)\n(?: {4}options: (?P<options>\{.*\})\n)?", re.MULTILINE)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")

_texts: dict[str, str] = {}
_titles: dict[str, str] = {}
_sections: dict[str, list[str]] = {}
_loader = griffe.GriffeLoader(search_paths=["src"], allow_inspection=False)


def on_nav(nav: Any, **_: Any) -> None:
    """Keep the order of the pages, by top-level section."""
    _sections.clear()
    for item in nav.items:
        _sections[item.title or "Home"] = list(_pages(item))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Keep the Markdown of a page."""
    _texts[page.file.src_uri] = REFERENCE.sub(_documented, markdown)
    _titles[page.file.src_uri] = page.title


def on_post_build(config: Any, **_: Any) -> None:
    """Write all of it into the site."""
    site = Path(config.site_dir)
    listed = {page for pages in _sections.values() for page in pages}
    _sections.setdefault("Results", []).extend(sorted(_texts.keys() - listed))  # pages outside of the menu
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for section, pages in _sections.items():
        lines += ["", f"## {section}", ""]
        lines += [f"- [{_titles[page]}]({page}): {_description(_texts[page])}" for page in pages]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ordered = [page for pages in _sections.values() for page in pages]
    whole = [f"<!-- {page} -->\n\n{_texts[page].strip()}\n" for page in ordered]
    (site / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")
    for page in ordered:
        (site / page).parent.mkdir(parents=True, exist_ok=True)
        (site / page).write_text(_texts[page], encoding="utf-8")


def _pages(item: Any) -> Iterator[str]:
    if item.is_page:
        yield item.file.src_uri
    for child in item.children or ():
        yield from _pages(child)


def _description(text: str) -> str:
    """The first sentence of the first paragraph, without links."""
    paragraphs = (part.strip() for part in text.split("\n\n"))
    first = next(part for part in paragraphs if part and part[0] not in "#<|!:`-{")
    words = re.sub(r"^\d+\. ", "", LINK.sub(r"\1", " ".join(first.split())))
    return re.split(r"(?<=[.?])\s", words, maxsplit=1)[0].rstrip(":")


def _documented(found: re.Match[str]) -> str:
    """The docstrings that mkdocstrings puts at this place."""
    options = yaml.safe_load(found["options"] or "{}")
    package = found["path"].partition(".")[0]
    if package not in _loader.modules_collection:  # parsing it takes two seconds
        _loader.load(package)
    named = _loader.modules_collection[found["path"]]
    if named.is_alias:
        named = named.final_target
    chosen = [named.members[name] for name in options.get("members") or ()] or [named]
    return "\n\n".join(text for one in chosen for text in _entries(one)) + "\n"


def _entries(thing: Any) -> Iterator[str]:
    """A documented object, then the public methods and functions in it."""
    if thing.docstring is None:
        return
    parameters = f"({', '.join(map(str, thing.parameters))})" if thing.is_function else ""
    yield f"`{thing.path}{parameters}`\n\n{thing.docstring.value}"
    if not thing.is_function and not thing.is_attribute:
        for member in thing.members.values():
            if not member.is_alias and member.is_function and not member.name.startswith("_"):
                yield from _entries(member)
