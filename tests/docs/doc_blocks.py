"""Fenced blocks of the documentation, in order, with their language, title and exclusion."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])

SHOWN = {"text"}  # not run: output, file listings, formulas
RUN = {"python", "bash", "console", "yaml", "toml", "json"}

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n`]*)$")
_NOT_RUN = re.compile(r"^ *<!-- not run: (?P<reason>.+?) -->$")
_TITLE = re.compile(r'title="(?P<title>[^"]+)"')


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        line: number of its first line of text, from 1.
        title: file name of the block, or "".
        not_run: reason for its exclusion, or "".
    """

    page: Path
    line: int
    language: str
    title: str
    text: str
    not_run: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page. The comment `<!-- not run: why -->` on the line above excludes a block."""
    return list(_parse(page, page.read_text(encoding="utf-8").splitlines()))


def _parse(page: Path, lines: list[str]) -> Iterator[Block]:
    number = 0
    above = ""
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening is None:
            above = lines[number] or above
            number += 1
            continue
        start = number + 1
        end = start
        while lines[end].strip() != "```":
            end += 1
        indent = len(opening["indent"])
        text = "\n".join(line[indent:] for line in lines[start:end]) + "\n"
        title = _TITLE.search(opening["info"])
        reason = _NOT_RUN.match(above)
        yield Block(
            page,
            start + 1,
            opening["language"],
            title["title"] if title else "",
            text,
            reason["reason"] if reason else "",
        )
        above = ""
        number = end + 1
