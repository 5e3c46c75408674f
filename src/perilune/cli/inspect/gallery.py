"""`perilune model gallery`: architectures drawn and compared, from their configurations alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.arguments import Json, check_output_file
from perilune.cli.inspect.model_card import config_file
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError
from perilune.files import read_json, write_atomic


def gallery(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Your own models to add to the shipped ones, given as for `model card`.",
        ),
    ] = None,
    *,
    out: Annotated[
        Path, typer.Option(metavar="FILE", callback=check_output_file, help="Page to write.")
    ] = Path("gallery.html"),
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model to show side by side with another. Use the option twice."),
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=check_output_file,
            help="Also write the table as Markdown, as in the documentation.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page that draws and compares the architectures of well-known models and of your own.

    The page shows layers, parameters, the size of the KV cache, FLOPs per token, the memory of the weights,
    and whether Perilune runs the model with its own code, with transformers, or not at all. With `--json`,
    the command prints these facts instead.

    \b
    perilune model gallery --out gallery.html
    perilune model gallery ./my-model --compare "Qwen3 8B" --compare my-model
    """
    from perilune.models.gallery.facts import Entry, describe, shipped
    from perilune.ui.gallery import render_gallery, render_gallery_markdown

    own = []
    for reference in models or ():
        file = config_file(reference)
        raw = read_json(file)
        if not isinstance(raw, Mapping):
            raise RequestError(f"holds a {type(raw).__name__}, not an object", where=str(file))
        name = file.parent.resolve().name if file.name == "config.json" else file.stem
        own.append(describe(Entry(name, str(file), str(file), raw)))
    names = [*(entry.name for entry in shipped()), *(document["name"] for document in own)]
    for name in compare or ():
        if name not in names:
            raise RequestError(f"no model '{name}'", where="--compare", remedy=f"one of: {', '.join(names)}")
    if len(compare or ()) > 2:
        raise RequestError("compares two models", where="--compare", remedy="give it at most twice")
    documents = [*map(describe, shipped()), *own]
    if markdown is not None:
        write_atomic(markdown, render_gallery_markdown(documents))
        echo(f"wrote {markdown}", err=True)
    if as_json:
        print_json(documents)
        return
    write_atomic(out, render_gallery(documents, [names.index(name) for name in compare or ()]))
    echo(f"wrote {out}: {len(documents)} models")
