"""Chromium for the tests of web pages, and the URLs that every page contains."""

import re
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

# Namespaces of elements, and URLs in the notices of vendored scripts. No page loads anything from them.
NAMED_URLS = {
    "http://www.w3.org/2000/svg",
    "http://www.w3.org/1999/xhtml",
    "http://www.w3.org/1998/Math/MathML",
    "http://www.apache.org/licenses/",
    "http://www.apache.org/licenses/LICENSE-2.0",
    "https://github.com/leeoniya/uPlot",
}


def urls_in(page: str) -> set[str]:
    """All URLs in the text of a page, except those above."""
    return set(re.findall(r"https?:[^\s\"'`<>)]*", page)) - NAMED_URLS
