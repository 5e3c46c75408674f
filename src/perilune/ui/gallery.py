"""The gallery of architectures as a self-contained page, and as a page of the documentation."""

from collections.abc import Mapping, Sequence
from typing import Any

from perilune.models.gallery.concepts import CONCEPTS
from perilune.ui.report import PAGE_SCRIPTS, render_page

SCRIPTS = (*PAGE_SCRIPTS, "gallery.js")
COLUMNS = (
    *("Model", "Parameters", "Active", "Published", "Layers"),
    *("Cache 1k", "32k", "128k", "Next token at 1k", "Concepts", "Runs"),
)

CARD_FIGURES = ("parameters", "active", "published", "context", "cache", "concepts", "Perilune")


def render_gallery(models: Sequence[Mapping[str, Any]], compared: Sequence[int] = ()) -> str:
    """Return the HTML page on `models`, as `models.gallery.facts.describe` gives them.

    Args:
        compared: indices of up to two models to show side by side; by default the first and the last.
    """
    ends = (0, len(models) - 1)
    document = {
        "models": [{**model, "figures": list_figures(model)} for model in models],
        "main": [name for name, _ in list_figures(models[0]) if name.startswith(CARD_FIGURES)],
        "concepts": CONCEPTS,
        "compared": [*compared, *ends[len(compared) :]],
    }
    return render_page("Architectures", SCRIPTS, document)


def list_figures(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of a model as (name, text)."""
    runs, published = model["runs"], model["published"]
    support = runs["runs"] + (
        ", unquantized (the published weights are quantized)" if runs["quantized"] else ""
    )
    active = f", {published['active']} active" if published.get("active") else ""
    return [
        ("parameters", _format_count(model["parameters"])),
        ("active for a token", _format_count(model["active_parameters"])),
        ("published", published.get("total", "–") + active),
        ("layers", str(sum(run["count"] for run in model["layers"]))),
        ("context", f"{model['max_positions']:,} tokens"),
        *((f"cache, {_format_tokens(n)}", _format_bytes(size)) for n, size in model["cache_bytes"].items()),
        *(
            (f"next token at {_format_tokens(n)}", _format_flops(count))
            for n, count in model["token_flops"].items()
        ),
        *((f"weights, {kind}", _format_bytes(size)) for kind, size in model["weight_bytes"].items()),
        ("concepts", ", ".join(model["concepts"]) or "–"),
        ("Perilune runs it", support + (f": {runs['reason']}" if runs["reason"] else "")),
        ("source", model["source"]),
        ("notes", "; ".join(model["notes"])),
    ]


def _format_count(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:,.0f}"


def _format_bytes(value: int | None) -> str:
    if value is None:
        return "–"
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{value / (1 << power):.4g} {unit}"
    return f"{value} B"


def _format_flops(value: int | None) -> str:
    return "–" if value is None else f"{value / 1e9:.4g} GFLOP"


def _format_tokens(length: str) -> str:
    return f"{int(length) // 1024}k tokens"


def render_gallery_markdown(models: Sequence[Mapping[str, Any]]) -> str:
    """Return the reference page: a table of models, and the concepts."""
    lines = [
        "# Architectures",
        "",
        f"The package contains the public configurations of {len(models)} models. All figures of the table",
        "are computed from these configurations, except for the column *Published*: the number of",
        "parameters that the publisher states.",
        "",
        "* *Active* is the number of parameters that compute one token. It includes the embedding, which",
        "  some publishers leave out.",
        "* *Cache* is the size of the KV cache for one sequence of 1k (1,024), 32k or 128k tokens in",
        "  bfloat16. – means that the model's context is shorter.",
        "* *Next token at 1k* is the compute for one token with 1,024 tokens in the cache.",
        "* *Runs* says how Perilune runs a checkpoint with unquantized, FP8 or MXFP4 weights. *natively*:",
        "  with Perilune's decoder. *with transformers*: with the transformers package, only for sampling",
        "  and scoring. *not*: not yet.",
        "",
        "`perilune model gallery` writes a page with drawings of the layers, all figures, and the reason",
        "why a model does not run natively. The page shows any two models side by side. Your own",
        "`config.json` can be one of them.",
        "",
        "<!-- Written by `perilune model gallery --markdown gallery.md`; a test keeps it in step. -->",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---|{'--:|' * 8}---|---|",
        *map(_table_row, models),
        "",
        "## Concepts",
        "",
        "| | | In our decoder | Source |",
        "|---|---|---|---|",
    ]
    for concept in CONCEPTS:
        code = f"`{concept.code}`" if concept.code else "not implemented"
        lines.append(f"| {concept.name} | {concept.title}. {concept.text} | {code} | {concept.source} |")
    lines += [
        "",
        "## Sources",
        "",
        "| Model | Source of the configuration | Source of the published parameters |",
        "|---|---|---|",
    ]
    for model in models:
        lines.append(f"| {model['name']} | {model['source']} | {model['published'].get('source', '–')} |")
    return "\n".join(lines) + "\n"


def _table_row(model: Mapping[str, Any]) -> str:
    cache = [_format_mebibytes(value) for value in model["cache_bytes"].values()]
    cells = [
        model["name"],
        f"{model['parameters'] / 1e9:,.2f}B",
        f"{model['active_parameters'] / 1e9:,.2f}B",
        model["published"].get("total", "–"),
        sum(run["count"] for run in model["layers"]),
        *cache,
        f"{next(iter(model['token_flops'].values())) / 1e9:,.1f} GFLOP",
        ", ".join(model["concepts"]),
        model["runs"]["runs"],
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _format_mebibytes(value: int | None) -> str:
    return "–" if value is None else f"{value / (1 << 20):,.0f} MiB"
