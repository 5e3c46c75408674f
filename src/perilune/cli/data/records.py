"""`perilune data`: generate, inspect, filter and convert records; inspect episodes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perilune.cli.arguments import Json, check_output_file, check_output_folder, make_command_group
from perilune.cli.console import make_stage_progress
from perilune.cli.data.generate import generate
from perilune.cli.output import echo, print_json
from perilune.data.conversion import ImportDefaults, convert_files, rejects_file
from perilune.errors import WorkFailedError
from perilune.files import read_json_lines

BAR_WIDTH = 40  # characters of the longest bar

app = make_command_group("Generate, inspect, filter and convert training data.")

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
    plot: Annotated[bool, typer.Option("--plot", help="Plot lengths and scores.")] = False,
    languages: Annotated[
        bool, typer.Option("--languages", help="Detect the languages of the answers.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every row. Print counts, lengths, scores, duplicates, and tasks that occur in several files."""
    from perilune.data.inspection import inspect_files

    report = inspect_files(files, languages=languages)
    if as_json:
        print_json(report)
        return
    for figures in report["files"]:
        echo(f"{figures['file']}: {figures['rows']} {figures['kind']}")
        for name, value in figures.items():
            if name not in ("file", "kind", "rows", "histograms"):
                echo(f"  {name.replace('_', ' '):18} {_format_value(value)}")
        for name, bars in figures["histograms"].items() if plot else ():
            echo(f"  {name.replace('_', ' ')}:\n{_format_bars(bars)}")
    for pair in report["shared_tasks"]:
        echo(f"{' and '.join(pair['files'])} have {pair['tasks']} tasks in common")


def _format_bars(histogram: dict[str, list[float]]) -> str:
    edges, counts = histogram["edges"], histogram["counts"]
    most = max(counts)
    return "\n".join(
        f"    {low:10.4g} to {high:<10.4g} {'█' * round(BAR_WIDTH * count / most):{BAR_WIDTH}} {count:,}"
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    )


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(item)}" for name, item in value.items()) or "none"
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
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", callback=check_output_folder, help="Folder for train.jsonl and the other files."
        ),
    ],
    *,
    evaluation: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Records that training must not see. Repeatable.")
    ] = [],  # noqa: B006  # typer reads the default and never changes it
    min_score: Annotated[float | None, typer.Option(help="Lowest score to keep.")] = None,
    best: Annotated[
        int, typer.Option(min=0, help="Number of records to keep for each task, the best first; 0 for all.")
    ] = 1,
    near: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Similarity at which texts count as duplicates, of which only the best record is kept.",
        ),
    ] = None,
    min_characters: Annotated[
        int, typer.Option(min=0, help="Minimum length of the last answer in characters.")
    ] = 1,
    max_characters: Annotated[
        int | None, typer.Option(min=1, help="Maximum length of a conversation in characters.")
    ] = None,
    language: Annotated[list[str], typer.Option(metavar="CODE", help="Language to keep. Repeatable.")] = [],  # noqa: B006  # likewise
    ngram: Annotated[
        int, typer.Option(min=2, help="Number of consecutive words in common that count as contamination.")
    ] = 13,
    validation: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of tasks for validation.jsonl.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Filter records for training. Rejected records go to rejected.jsonl with file, line and reason."""
    from perilune.data.filtering import FilterSettings, filter_files

    settings = FilterSettings(
        min_score=min_score,
        best=best or None,
        near=near,
        min_characters=min_characters,
        max_characters=max_characters,
        languages=tuple(language),
        ngram=ngram,
        validation=validation,
    )
    with make_stage_progress() as view:
        view.start("filter", "")

        def show(done: int, total: int, figures: Mapping[str, float]) -> None:
            view.update("filter", done, total, "bytes", figures)

        report = filter_files(files, evaluation, settings, out, show)
        view.end("filter", "done", "")
    if as_json:
        print_json(report)
    else:
        _print_filtered(report, out)
    if not report["train"] + report["validation"]:
        raise WorkFailedError("no record was kept", where=str(out / "rejected.jsonl"))


def _print_filtered(report: Mapping[str, Any], out: Path) -> None:
    kept = f"{report['train']:,} kept for training and {report['validation']:,} for validation"
    echo(f"{report['read']:,} records read, {kept}")
    for reason, count in report["rejected"].items():
        echo(f"  {reason:15} {count:,}")
    if report["rejected"].get("broken"):
        rejected = read_json_lines(out / "rejected.jsonl")
        row = next(row for row in rejected if row["reason"] == "broken")
        echo(f"the first broken row is {row['file']}:{row['line']}: {row['detail']}")
    validation = "validation.jsonl, " if (out / "validation.jsonl").exists() else ""
    echo(f"wrote train.jsonl, {validation}rejected.jsonl and filter.json to {out}")


@app.command(epilog="Example: perilune data convert chats.jsonl --to records --score 1 --out records.jsonl")
def convert(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Records, OpenAI messages or ShareGPT conversations."),
    ],
    to: Annotated[
        Literal["records", "openai", "sharegpt"], typer.Option(help="Format: records, openai or sharegpt.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE.jsonl", callback=check_output_file, help="File to write.")
    ],
    *,
    environment: Annotated[str, typer.Option(help="Environment of rows without one.")] = "chat",
    source: Annotated[str, typer.Option(help="Source of rows without one.")] = "imported",
    score: Annotated[
        float | None, typer.Option(help="Score of rows without one. By default such rows are rejected.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert conversations. Rejected rows go to FILE.rejected.jsonl with file, line and reason."""
    report = convert_files(files, to, out, ImportDefaults(environment, source, score))
    if as_json:
        print_json(report)
    else:
        echo(f"converted {report['written']:,} of {report['read']:,} rows")
        for reason, count in report["rejected"].items():
            echo(f"  rejected: {count:,} x {reason}")
        echo(f"wrote {out}")
    if not report["written"]:
        raise WorkFailedError("no row was converted", where=str(rejects_file(out)))
