"""Renders the report as one self-contained HTML file with template, styles, scripts and data.

The text of models is untrusted. The file contains it as JSON in which `<`, `>` and `&` are escaped, so that
no text can end its script element. The scripts show it in text nodes only. The Content-Security-Policy allows
only our own scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from perilune.bundle.storage import storage_errors
from perilune.files import write_atomic
from perilune.ui.collect import ReportData, collect
from perilune.ui.embedding import embeddable_json
from perilune.ui.episodes import RIGHT, EpisodeLibrary
from perilune.ui.view import ExperimentView

SCRIPTS = (
    "page.js",
    "charts.js",
    "episodes.js",
    "outcome.js",
    "course.js",
    "report.js",
)  # in the order of execution


def build_report(experiment: ExperimentView, out: Path) -> Path:
    """Write the report on `experiment` to `out` and return it.

    Raises:
        RequestError: when `out` cannot be written.
    """
    page = render(collect(experiment))
    with storage_errors("write the report", out):
        write_atomic(out, page)
    return out


def render(data: ReportData) -> str:
    """The whole page as HTML text."""
    document = {field.name: getattr(data, field.name) for field in fields(data) if field.name != "library"}
    index, blocks = _episodes(data.library)
    title = f"{data.experiment.name}: {data.headline.title}"
    return render_page(title, SCRIPTS, document, [_block("episodes-index", embeddable_json(index)), *blocks])


def render_page(title: str, names: Sequence[str], document: Any, blocks: Sequence[str] = ()) -> str:
    """A self-contained page.

    Args:
        names: of its scripts, in the order of execution.
        document: the data that its scripts read: JSON values and dataclasses.
        blocks: further elements with data.
    """
    assets = files("perilune.ui") / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8")
    scripts = [(assets / name).read_text(encoding="utf-8") for name in names]
    return Template((assets / "report.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        policy=_policy(style, scripts),
        style=style,
        data="\n".join([_block("report-data", embeddable_json(_plain(document))), *blocks]),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _policy(style: str, scripts: list[str]) -> str:
    """A Content-Security-Policy that allows only these scripts and styles, and no loading."""
    allowed = " ".join(_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _block(name: str, json_text: str) -> str:
    return f'<script type="application/json" id="{name}">{json_text}</script>'


def _plain(value: Any) -> Any:
    """Dataclasses as objects, tuples as arrays, NaN and infinity as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _episodes(library: EpisodeLibrary) -> tuple[dict[str, Any], list[str]]:
    """The index of the episode browser, and one data element for each set."""
    blocks: list[str] = []
    stages = []
    for stage in library.stages:
        sets = []
        for one in stage.sets:
            script = f"episodes-{len(blocks)}"
            blocks.append(_block(script, one.json))
            sets.append({**_plain(one), "script": script, "json": None})
        stages.append({**_plain(stage), "sets": sets})
    return {
        "stages": stages,
        "vocabularies": _plain(library.vocabularies),
        "right": RIGHT,
        "lead": _lead(library),
    }, blocks


def _lead(library: EpisodeLibrary) -> str:
    embedded = sum(one.embedded for one in library.sampled)
    total = sum(one.total for one in library.sampled)
    included = f"This file contains all {total:,} episodes."
    if embedded < total or library.steps_left_out:
        included = (
            f"This file contains {embedded:,} of {total:,} episodes: whole groups, chosen by a hash of their "
            "ids, so the choice does not depend on rewards."
        )
    if library.steps_left_out:
        included += f" {library.steps_left_out:,} steps are omitted."
    return (
        f"Prompts, answers and rewards. {included} The darker the colour of a token, the lower its "
        "probability under the policy."
    )
