"""Turns a page into slides for Marp, which is Markdown with a rule between slides."""

import base64
import re
from pathlib import Path

from perilune.wiki.markdown import strip_comments, strip_front_matter

_SECTION = re.compile(r"^(?=## )", re.M)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\([^)]*\.md\)")
_PLOT = re.compile(r"(?<=\]\()[^):]+\.svg(?=\))")
MAX_TABLE_ROWS = 12  # of a table, on a slide


def render_slides(page: str, folder: Path) -> str:
    """Return the slides of a page: one for the beginning, and one for each section that has content.

    Slides leave the wiki, so they contain the plots, and the names of other pages without the links.
    """
    text = re.sub(r"\n{3,}", "\n\n", strip_comments(strip_front_matter(page)))
    text = _PLOT.sub(lambda match: _embed_plot(folder / Path(match[0]).name), _LINK.sub(r"\1", text))
    parts = [_shorten_tables(part.strip()) for part in _SECTION.split(text)]
    return "---\nmarp: true\npaginate: true\n---\n\n" + "\n\n---\n\n".join(filter(None, parts)) + "\n"


def _embed_plot(plot: Path) -> str:
    data = plot.read_bytes() if plot.is_file() else b""
    return f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}"


def _shorten_tables(part: str) -> str:
    """Return a slide with the first rows of its tables; "" for a heading alone."""
    kept, rows, left = [], 0, 0
    for line in part.splitlines():
        rows = rows + 1 if line.startswith("|") else 0
        if rows > MAX_TABLE_ROWS + 2:
            left += 1
        else:
            kept.append(line)
    if left:
        kept.append(f"\n{left} more rows are on the page.")
    return "\n".join(kept) if len([line for line in kept if line.strip()]) > 1 else ""
