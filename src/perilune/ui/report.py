"""Renders the report as one self-contained HTML file with template, styles, scripts and data.

The text of models is untrusted. The file contains it as JSON in which `<`, `>` and `&` are escaped, so that
no text can end its script element. The scripts show it in text nodes only. The Content-Security-Policy allows
only our own scripts, by their hashes.
"""

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
from perilune.ui.collect import ReportData, collect_report
from perilune.ui.embedding import embeddable_json
from perilune.ui.episodes import RIGHT_REWARD, EpisodeLibrary
from perilune.ui.view import ExperimentView

# In the order of execution.
PAGE_SCRIPTS = ("vendor/preact.umd.js", "vendor/hooks.umd.js", "vendor/htm.umd.js", "page.js")
CHART_SCRIPTS = (*PAGE_SCRIPTS, "vendor/uPlot.iife.min.js", "charts.js")
SCRIPTS = (
    *CHART_SCRIPTS,
    "verdict.js",
    "tokens.js",
    "groups.js",
    "attempts.js",
    "spans.js",
    "episodes.js",
    "outcome.js",
    "course.js",
    "report.js",
)
LIVE_SCRIPTS = (*SCRIPTS, "live.js")
SHARED_SCRIPTS = CHART_SCRIPTS[:-1]  # all scripts use the names that these define
STYLES = ("vendor/uPlot.min.css", "report.css")
LICENSES = ("preact", "htm", "uPlot")  # every page has these notices


def build_report(experiment: ExperimentView, out: Path) -> Path:
    """Write the report on `experiment` to `out` and return it.

    Raises:
        RequestError: when `out` cannot be written.
    """
    page = render_report(collect_report(experiment))
    with storage_errors("write the report", out):
        write_atomic(out, page)
    return out


def render_report(
    data: ReportData, names: Sequence[str] = SCRIPTS, live: Mapping[str, Any] | None = None
) -> str:
    """Return the whole page as HTML text.

    Args:
        live: `base`, the path below which the scripts find episodes and events, and `offsets`, the sizes of
            the files that the page was read from; None for a page that contains everything.
    """
    document = report_document(data) | {"live": live, "index": "/" if live else None}
    index, blocks = _episode_blocks(data.library)
    title = f"{data.experiment['name']}: {data.headline.title}"
    index_block = render_data_block("episodes-index", embeddable_json(index))
    return render_page(title, names, document, [index_block, *blocks], live=live is not None)


def report_document(data: ReportData) -> dict[str, Any]:
    """Return all data of the page except its episodes, as JSON values."""
    return {
        field.name: to_plain(getattr(data, field.name)) for field in fields(data) if field.name != "library"
    }


def render_page(
    title: str, names: Sequence[str], document: Any, blocks: Sequence[str] = (), *, live: bool = False
) -> str:
    """Return a self-contained page.

    Args:
        names: asset files of the scripts, in the order of execution.
        document: the data that the scripts read: JSON values and dataclasses.
        blocks: further elements with data.
        live: whether the scripts may send requests to the page's server.
    """
    assets = files("perilune.ui") / "assets"
    style = "".join((assets / name).read_text(encoding="utf-8") for name in STYLES)
    scripts = [(assets / name).read_text(encoding="utf-8") for name in names]
    licenses = [(assets / "vendor" / f"{name}.LICENSE").read_text(encoding="utf-8") for name in LICENSES]
    return Template((assets / "report.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        policy=_security_policy(style, scripts, live),
        style=style,
        data="\n".join([render_data_block("report-data", embeddable_json(to_plain(document))), *blocks]),
        licenses="\n".join(f"{name}:\n{text}" for name, text in zip(LICENSES, licenses, strict=True)),
        # The other scripts are modules, so that their names do not collide.
        scripts="\n".join(
            f"<script{'' if name in SHARED_SCRIPTS else ' type=module'}>{script}</script>"
            for name, script in zip(names, scripts, strict=True)
        ),
    )


def _security_policy(style: str, scripts: list[str], live: bool) -> str:
    """Return a Content-Security-Policy that allows only these scripts and styles, and no other sources."""
    allowed = " ".join(_hash(script) for script in scripts)
    connect = "connect-src 'self'; " if live else ""
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; {connect}"
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render_data_block(name: str, json_text: str) -> str:
    """Return an element with JSON, which browsers do not execute."""
    return f'<script type="application/json" id="{name}">{json_text}</script>'


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return (kind is float and math.isfinite(value)) or kind is int or value is None or kind is str


def to_plain(value: Any) -> Any:
    """Return dataclasses as objects, tuples as arrays, and NaN and infinity as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [item if _is_plain(item) else to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _episode_blocks(library: EpisodeLibrary) -> tuple[dict[str, Any], list[str]]:
    blocks: list[str] = []
    stages = []
    for stage in library.stages:
        sets = []
        for episode_set in stage.sets:
            script = f"episodes-{len(blocks)}" if episode_set.json else None
            if script is not None:
                blocks.append(render_data_block(script, episode_set.json))
            sets.append({**to_plain(episode_set), "script": script, "json": None})
        stages.append({**to_plain(stage), "sets": sets})
    return {
        "stages": stages,
        "vocabularies": to_plain(library.vocabularies),
        "right": RIGHT_REWARD,
        "lead": _episodes_lead(library),
    }, blocks


def _episodes_lead(library: EpisodeLibrary) -> str:
    color = "The stronger the color of a token, the lower its probability under the policy."
    if any(stage.steps or any(episode_set.name for episode_set in stage.sets) for stage in library.stages):
        return f"Prompts, answers and rewards, read from the files of the runs. {color}"
    embedded = sum(episode_set.embedded for episode_set in library.sampled)
    total = sum(episode_set.total for episode_set in library.sampled)
    included = f"This file contains all {total:,} episodes."
    if embedded < total or library.steps_left_out:
        included = (
            f"This file contains {embedded:,} of {total:,} episodes: whole groups, chosen by a hash of their "
            "ids, so the choice does not depend on rewards."
        )
    if library.steps_left_out:
        included += f" {library.steps_left_out:,} steps are omitted."
    return f"Prompts, answers and rewards. {included} {color}"
