"""`perilune bundle`: freeze, verify and inspect bundles."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import (
    Json,
    SetOption,
    check_output_folder,
    complete_run_names,
    find_bundle,
    make_command_group,
)
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError
from perilune.plural import plural

MAX_LISTED_DIFFERENCES = 20  # without --json

app = make_command_group("Freeze, verify and inspect bundles.")

Bundle = Annotated[
    str,
    typer.Argument(
        metavar="PATH|RUN",
        help="Folder of a bundle, or a run: its id, EXPERIMENT/STAGE, or a stage of the latest experiment.",
        autocompletion=complete_run_names,
    ),
]


@app.command(epilog="Example: perilune bundle verify quickstart/rl")
def verify(
    bundle: Bundle,
    digest: Annotated[str | None, typer.Option(help="Digest that the bundle must have.")] = None,
    as_json: Json = False,
) -> None:
    """Check every file of a bundle against its digest. Exits with 1 and lists the files that differ.

    Artifacts that runtime/removed.json lists, because `perilune gc` deleted them, may be missing. To check
    the signature of that list, run `perilune verify`.
    """
    from perilune.bundle.attested import read_unverified_removals
    from perilune.bundle.verify import verify as differences_of

    path = find_bundle(bundle)
    removed = read_unverified_removals(path)
    differences = differences_of(path, digest, removed)
    if as_json:
        listed = [asdict(difference) for difference in differences]
        document = {"path": str(path), "verified": not listed, "differences": listed}
        print_json(document | {"removed": sorted(removed)})
    elif differences:
        for difference in differences[:MAX_LISTED_DIFFERENCES]:
            echo(f"differs: {difference}")
        if len(differences) > MAX_LISTED_DIFFERENCES:
            echo(f"and {len(differences) - MAX_LISTED_DIFFERENCES} more; --json lists all differences")
    else:
        from perilune.bundle.digest import recorded_digest

        note = f"; {len(removed)} artifacts were deleted by perilune gc" if removed else ""
        echo(f"verified: {recorded_digest(path)}{note}")
    raise typer.Exit(1 if differences else 0)


@app.command(epilog="Example: perilune bundle inspect quickstart/rl --json")
def inspect(bundle: Bundle, as_json: Json = False) -> None:
    """Show what a bundle runs, its inputs and its files."""
    from perilune.bundle.inspection import inspect as summary_of

    summary = summary_of(find_bundle(bundle))
    if as_json:
        print_json(summary)
        return
    echo(f"digest     {summary['digest']}")
    echo(f"runs       stage {summary['stage']}, task {summary['task']}, seed {summary['seed']}")
    for entry in summary["inputs"]:
        echo(f"input      {entry['name']}: {entry['kind']}, {_format_extent(entry)}, {entry['digest'][:12]}")
    echo(f"frozen     {_format_extent(summary['frozen'])}")
    complete = "complete" if summary["artifacts"]["manifest"] else "no manifest"
    echo(f"artifacts  {_format_extent(summary['artifacts'])}, {complete}")
    if summary["secrets"]:
        echo(f"secrets    {', '.join(summary['secrets'])} ")
    if summary["result"] is not None:
        echo(f"result     exit code {summary['result'].get('exit_code')}")


@app.command(
    epilog="Example: perilune bundle freeze recipes/quickstart.yaml --stage traces --out /tmp/bundle"
)
def freeze(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="File of the recipe.")],
    *,
    stage: Annotated[str, typer.Option(help="Name of the stage to freeze.")],
    out: Annotated[Path, typer.Option(callback=check_output_folder, help="New folder.")],
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="FIELD=PATH",
            help="Path of the earlier stage's output that the key FIELD consumes. Repeatable.",
        ),
    ] = None,
    set_: SetOption = None,
    as_json: Json = False,
) -> None:
    """Freeze one stage of a recipe into a bundle, which `perilune worker` runs."""
    from perilune.bundle.freeze import freeze as freeze_job
    from perilune.bundle.job import InputReference
    from perilune.bundle.plugin import consumed_fields, load_plugin
    from perilune.recipe.load import load_recipe
    from perilune.recipe.schema import MODEL, build_job
    from perilune.recipe.staging import stage_files

    loaded = load_recipe(recipe, set_ or ())
    try:
        chosen = loaded.stage(stage)
    except KeyError:
        names = ", ".join(candidate.name for candidate in loaded.stages)
        raise RequestError(f"no stage '{stage}'", where=str(recipe), remedy=f"one of: {names}") from None
    wanted = {field: source for field, source in chosen.consumes.items() if source != MODEL}
    inputs = _parse_inputs(given or [], wanted)
    kinds = consumed_fields(load_plugin(chosen.task).spec)
    references = tuple(
        InputReference(name=field, path=f"inputs/{field}", digest="", kind=kinds[field])
        for field in sorted(inputs)
    )
    job, files = stage_files(build_job(loaded, chosen).model_copy(update={"inputs": references}))
    digest = freeze_job(job, inputs | files, out)
    if as_json:
        print_json({"path": str(out), "stage": stage, "digest": digest})
    else:
        echo(f"frozen: {digest}\n  at {out}\n  next: perilune bundle verify {shlex.quote(str(out))}")


def _parse_inputs(given: list[str], wanted: dict[str, str]) -> dict[str, Path]:
    """Return the --input options as {field: path}, one for each field that the stage consumes."""
    inputs = {}
    for option in given:
        field, equals, path = option.partition("=")
        if not equals or field not in wanted:
            fields = ", ".join(sorted(wanted)) or "none"
            raise RequestError(
                f"--input {option}: the stage consumes no such field", remedy=f"fields: {fields}"
            )
        inputs[field] = Path(path)
    for field, source in sorted(wanted.items()):
        if field not in inputs:
            raise RequestError(
                f"the output of stage '{source}', which {field} consumes, is missing",
                remedy=f"--input {field}=PATH",
            )
    return inputs


def _format_extent(extent: dict[str, int]) -> str:
    return f"{plural(extent['files'], 'file')}, {extent['bytes']:,} bytes"
