"""`perilune data generate`: records that a teacher writes, each judged by the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perilune.cli.environments import section_of, settings_of
from perilune.cli.output import echo, print_json
from perilune.errors import WorkFailedError


def generate(
    environment: Annotated[
        str, typer.Argument(metavar="ENVIRONMENT", help="An id, with a family: reasoning_gym/chain_sum.")
    ],
    teacher: Annotated[str, typer.Option(help="Who writes.")],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where records.jsonl and rejected.jsonl are written.")
    ],
    *,
    settings: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="A field of the environment: game=hex."),
    ] = [],  # noqa: B006  # typer reads the default and never changes it
    options: Annotated[
        list[str], typer.Option("--option", metavar="KEY=VALUE", help="What else the teacher takes.")
    ] = [],  # noqa: B006  # likewise
    strategies: Annotated[
        list[str],
        typer.Option(
            "--strategy", metavar="NAME=SHARE", help="Share of a strategy; the teacher's own if none."
        ),
    ] = [],  # noqa: B006  # likewise
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many records.")] = 1000,
    seed: Annotated[int, typer.Option(help="Fixes tasks and what the teacher writes.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Let a teacher write records for an environment's training tasks; what is refused is set aside."""
    from perilune.cli.console import stage_progress
    from perilune.data.generators import make_teacher
    from perilune.data.generators.gathering import gather

    told = settings_of(options, "--option")
    shares = settings_of(strategies, "--strategy")
    with stage_progress() as view:
        view.started("generate", "")

        def show(kept: int, rejected: int) -> None:
            view.progressed("generate", kept, count, "records", {"rejected": rejected})

        found = gather(
            section_of(environment, settings), make_teacher(teacher, shares, told), count, seed,
            told={"options": told}, show=show,
        )  # fmt: skip
        view.ended("generate", "done", "")
    found.write(out)
    if as_json:
        print_json({
            "environment": found.environment, "rows": len(found.kept), "rejected": len(found.rejected),
            "reasons": dict(found.reasons), "sources": dict(found.sources),
        })  # fmt: skip
    else:
        echo(f"{len(found.kept):,} records of {found.environment}, {len(found.rejected):,} rejected")
        for source, number in found.sources.most_common():
            echo(f"  {source:24} {number:,}")
        for reason, number in found.reasons.most_common():
            echo(f"  rejected: {reason:14} {number:,}")
        echo(f"{out}: records.jsonl, rejected.jsonl with reasons")
    if len(found.kept) < count:
        raise WorkFailedError(
            f"{len(found.kept)} of {count} records were kept ({found.told()})",
            where=str(out / "rejected.jsonl"),
            remedy="ask for fewer, tell the environment or the teacher otherwise, or take another teacher",
        )
