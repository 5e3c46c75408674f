"""`perilune model card`: parameters, memory and compute of a model, from its config.json alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from perilune.cli.arguments import Json, check_output_file
from perilune.cli.inspect.cache_curve import curve_svg
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError
from perilune.files import read_json, write_atomic
from perilune.models.card.model_card import ITEM_BYTES
from perilune.units import format_count, format_flops, format_size

DTYPES = ("float32", "bfloat16", "float16", "int8")


def card(
    path: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A config.json, its folder, a GGUF file, a fetched model, or an id in the local Hugging "
            "Face cache.",
        ),
    ],
    *,
    context: Annotated[int, typer.Option(min=0, help="Tokens in a sequence; 0 for the model's maximum.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    dtype: Annotated[
        str, typer.Option(help=f"Dtype of weights and cache: {', '.join(DTYPES)}. Default: as in the config.")
    ] = "",
    as_json: Json = False,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=check_output_file, help="Also write a plot of the size of the KV cache."
        ),
    ] = None,
) -> None:
    """Print a model's parameters, attention layers, KV cache, compute and memory."""
    from perilune.models.card.document import card_document
    from perilune.models.card.from_config import model_card

    file = config_file(path)
    raw = read_json(file)
    described = model_card(raw, where=str(file))
    dtype = dtype or _dtype_of(raw)
    if dtype not in ITEM_BYTES:
        raise RequestError(f"unknown dtype '{dtype}'", where="--dtype", remedy=", ".join(ITEM_BYTES))
    document = card_document(
        described, context=context or described.max_positions, batch=batch, item_bytes=ITEM_BYTES[dtype]
    ) | {"dtype": dtype}
    if as_json:
        print_json(document)
    else:
        echo(card_text(document))
    if svg is not None:
        write_atomic(svg, curve_svg(document["curve"], f"{described.model_type}: KV cache, bytes per token"))
        echo(f"wrote {svg}", err=True)


def card_text(document: Mapping[str, Any]) -> str:
    lines = [
        f"{document['model_type']}: {format_count(document['parameters'])} parameters, "
        f"{format_count(document['active_parameters'])} active for each token, "
        f"{format_count(document['embedding_parameters'])} in the embedding and the head",
        "",
        "layers",
        *(f"  {number:>4} x {kind}" for kind, number in document["kinds"].items()),
        "",
        f"KV cache and compute per token in {document['dtype']}, by sequence length",
        f"  {'tokens':>12}  {'cache/token':>12}  {'cache':>12}  {'generate':>14}  {'learn':>14}",
    ]
    for point in document["curve"]:
        lines.append(
            f"  {point['tokens']:>12,}  {format_size(point['cache_bytes_per_token']):>12}"
            f"  {format_size(point['cache_bytes']):>12}  {format_flops(point['generation_flops']):>14}"
            f"  {format_flops(point['training_flops_per_token']):>14}"
        )
    memory = document["memory"]
    lines += ["", f"memory for {memory['batch']:,} x {memory['tokens']:,} tokens"]
    for use in ("sampling", "training"):
        plan = memory[use]
        persistent = ", ".join(f"{name} {format_size(value)}" for name, value in plan["persistent"].items())
        transient = " or ".join(f"{name} {format_size(value)}" for name, value in plan["transient"].items())
        lines.append(f"  {use:9} {format_size(plan['total'])}: {persistent}; temporarily {transient}")
    lines += [f"note: {note}" for note in document["notes"]]
    return "\n".join(lines)


def config_file(path: str) -> Path:
    """Return the config.json of a model that the user names.

    Raises:
        RequestError: when there is none.
    """
    file = Path(path).expanduser()
    if file.is_file() and file.suffix != ".gguf":
        return file
    from perilune.recipe.model_files import CONFIG_FILE, find_model
    from perilune.recipe.problems import ProblemsError

    try:
        return find_model(path, Path.cwd()) / CONFIG_FILE
    except ProblemsError as error:
        (problem,) = error.problems
        raise RequestError(problem.what.removeprefix("model.path: "), remedy=problem.remedy) from None


def _dtype_of(raw: Any) -> str:
    """Return the dtype in a config.json if we support it, else bfloat16."""
    inner = raw.get("text_config") if isinstance(raw, dict) else None
    for part in (raw, inner):
        dtype = part.get("dtype", part.get("torch_dtype")) if isinstance(part, dict) else None
        if dtype in DTYPES:
            return str(dtype)
    return "bfloat16"
