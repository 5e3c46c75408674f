"""`perilune data`: make records, look into them and into episodes, and filter them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from perilune.cli.arguments import command_group
from perilune.cli.generate import generate
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError

BAR = 40  # characters

app = command_group("Make data and look into it: traces that stages train on, episodes that they leave.")


@app.callback()
def data() -> None:
    """Make data and look into it: traces that stages train on, episodes that they leave."""


app.command(
    epilog="Example: perilune data generate open_spiel --set game=hex --teacher open_spiel --out games"
)(generate)


@app.command(epilog="Example: perilune data inspect train.jsonl validation.jsonl")
def inspect(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Records (.jsonl, or a folder of them) or episodes (.parquet)."
        ),
    ],
    *,
    plot: Annotated[bool, typer.Option("--plot", help="Draw lengths and scores.")] = False,
    languages: Annotated[bool, typer.Option("--languages", help="Guess the answers' languages.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check every row; print counts, lengths, scores, duplicates, and the tasks that files share."""
    from perilune.data.inspection import inspect_files

    report = inspect_files(files, languages=languages)
    if as_json:
        print_json(report)
        return
    for figures in report["files"]:
        echo(f"{figures['file']}: {figures['rows']} {figures['kind']}")
        for name, value in figures.items():
            if name not in ("file", "kind", "rows", "histograms"):
                echo(f"  {name.replace('_', ' '):18} {_words(value)}")
        for name, bars in figures["histograms"].items() if plot else ():
            echo(f"  {name.replace('_', ' ')}:\n{_bars(bars)}")
    for pair in report["shared_tasks"]:
        echo(f"{' and '.join(pair['files'])} share {pair['tasks']} tasks")


def _bars(histogram: dict[str, list[float]]) -> str:
    edges, counts = histogram["edges"], histogram["counts"]
    most = max(counts)
    return "\n".join(
        f"    {low:10.4g} to {high:<10.4g} {'█' * round(BAR * count / most):{BAR}} {count:,}"
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    )


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items()) or "none"
    if value is None:
        return "none"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


@app.command(
    "filter", epilog="Example: perilune data filter traces.jsonl --evaluation heldout.jsonl --out clean"
)
def filter_records(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Records (.jsonl, or a folder of them).")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where train.jsonl and the rest are written.")],
    *,
    evaluation: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Records that must not be trained on; repeatable.")
    ] = [],  # noqa: B006  # typer reads the default and never changes it
    min_score: Annotated[float | None, typer.Option(help="Least score.")] = None,
    best: Annotated[int, typer.Option(min=0, help="Records of a task, by score; 0 for all.")] = 1,
    near: Annotated[float | None, typer.Option(help="Similarity from which a text is a duplicate.")] = None,
    min_characters: Annotated[int, typer.Option(min=0, help="Of the last answer.")] = 1,
    max_characters: Annotated[int | None, typer.Option(min=1, help="Of the whole conversation.")] = None,
    language: Annotated[
        list[str], typer.Option(metavar="CODE", help="Keep these languages only; repeatable.")
    ] = [],  # noqa: B006  # likewise
    ngram: Annotated[int, typer.Option(min=2, help="Words in a row that contaminate.")] = 13,
    validation: Annotated[float, typer.Option(min=0.0, help="Share of tasks for validation.jsonl.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Keep what is worth training on; what is not goes to rejected.jsonl with file, line and reason."""
    from perilune.cli.console import stage_progress
    from perilune.data.filtering import FilterSettings, filter_files

    settings = FilterSettings(
        min_score=min_score, best=best or None, near=near, min_characters=min_characters,
        max_characters=max_characters, languages=tuple(language), ngram=ngram, validation=validation,
    )  # fmt: skip
    with stage_progress() as view:
        view.started("filter", "")

        def show(done: int, total: int, figures: Mapping[str, float]) -> None:
            view.progressed("filter", done, total, "bytes", figures)

        report = filter_files(files, evaluation, settings, out, show)
        view.ended("filter", "done", "")
    if as_json:
        print_json(report)
        return
    kept = f"{report['train']:,} kept for training, {report['validation']:,} for validation"
    echo(f"{report['read']:,} read, {kept}")
    for reason, count in report["rejected"].items():
        echo(f"  {reason:15} {count:,}")
    echo(f"{out}: train.jsonl, rejected.jsonl with reasons, filter.json")


@app.command(epilog="Example: perilune data convert chats.jsonl --to records --score 1 --out records.jsonl")
def convert(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Records, OpenAI's messages, ShareGPT's conversations."),
    ],
    to: Annotated[str, typer.Option(help="records, openai or sharegpt.")],
    out: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Where the rows are written.")],
    *,
    environment: Annotated[str, typer.Option(help="Of rows that name none.")] = "chat",
    source: Annotated[str, typer.Option(help="Of rows that name none.")] = "imported",
    score: Annotated[
        float | None, typer.Option(help="Of rows that have none; without it such rows are set aside.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Convert conversations; rows that cannot be go to FILE.rejected.jsonl with file, line and reason."""
    from perilune.data.conversion import FORMS, Unsaid, convert_files

    form = next((one for one in FORMS if one == to), None)
    if form is None:
        raise RequestError(f"no form called '{to}'", where="--to", remedy=f"one of: {', '.join(FORMS)}")
    report = convert_files(files, form, out, Unsaid(environment, source, score))
    if as_json:
        print_json(report)
        return
    echo(f"{report['written']:,} of {report['read']:,} rows")
    for reason, count in report["rejected"].items():
        echo(f"  set aside: {count:,} x {reason}")
    echo(str(out))
