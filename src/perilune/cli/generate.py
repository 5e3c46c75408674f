"""`perilune data generate`: records that a teacher or a model writes, each judged by the environment."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import checkpoint_folder
from perilune.cli.environments import section_of, settings_of
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError, WorkFailedError

if TYPE_CHECKING:
    from perilune.environments import Split


def generate(
    environment: Annotated[
        str, typer.Argument(metavar="ENVIRONMENT", help="An id, with a family: reasoning_gym/chain_sum.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where records.jsonl and rejected.jsonl are written.")
    ],
    *,
    teacher: Annotated[str, typer.Option(help="Who writes.")] = "",
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
    model: Annotated[
        str,
        typer.Option(
            metavar="CHECKPOINT", help="Instead of a teacher: a Hugging Face folder, or the run that made it."
        ),
    ] = "",
    samples: Annotated[int, typer.Option(min=1, help="Answers of a model to each task.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of a model.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.01, help="That a model is sampled at.")] = 1.0,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many records.")] = 1000,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Of how many tasks, whatever comes of them; else until enough.")
    ] = None,
    split: Annotated[str, typer.Option(help="train or heldout.")] = "train",
    seed: Annotated[int, typer.Option(help="Fixes tasks and what is written.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Let a teacher or a model write records for an environment's tasks; what is refused is set aside.

    Killed, it goes on where it was when it is asked for again, and ends with the same bytes.
    """
    if bool(teacher) == bool(model):
        raise RequestError("a teacher writes, or a model", where="--teacher", remedy="name one of them")
    if split not in ("train", "heldout"):
        raise RequestError(f"no split called '{split}'", where="--split", remedy="train or heldout")
    from perilune.cli.console import stage_progress
    from perilune.data import generation
    from perilune.environments.core.registry import make_environment
    from perilune.verifiers import Scorer

    section = section_of(environment, settings)
    made = make_environment(section)
    of: Split = "heldout" if split == "heldout" else "train"
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(section))
        generator: generation.Generator
        if teacher:
            from perilune.data.generators import make_teacher
            from perilune.data.generators.taught import Taught

            told = settings_of(options, "--option")
            writer = make_teacher(teacher, settings_of(strategies, "--strategy"), told)
            generator = Taught(writer, made, scorer.score, seed, section=section, told={"options": told})
        else:
            from perilune.tasks.datasets.sampled import Sampled, Sampling

            sampling = Sampling(samples, max_tokens, temperature, seed)
            generator = Sampled.open(checkpoint_folder(model), section, made, scorer, sampling)
        view = stack.enter_context(stage_progress())
        view.started("generate", "")
        found = generation.generate(
            generator, made.tasks(of, seed), generation.Wanted(count, tasks, seed, split), out,
            lambda kept, rejected: view.progressed(
                "generate", kept, count, "records", {"rejected": rejected}
            ),
        )  # fmt: skip
        view.ended("generate", "done", "")
    report = {"environment": made.id, **found}
    if as_json:
        print_json(report)
    else:
        _tell(report, out)
    if found["rows"] < (count if tasks is None else 1):
        asked = f"{count} records were kept" if tasks is None else f"{found['tasks']} tasks gave a record"
        raise WorkFailedError(
            f"{found['rows']} of {asked} ({_worst(found['reasons'])})",
            where=str(out / generation.REJECTED),
            remedy="ask for fewer, tell the environment or the teacher otherwise, or take another teacher",
        )


def _tell(report: dict[str, Any], out: Path) -> None:
    echo(f"{report['rows']:,} records of {report['environment']}, {report['rejected']:,} rejected")
    for source, number in report["sources"].items():
        echo(f"  {source:24} {number:,}")
    for reason, number in report["reasons"].items():
        echo(f"  rejected: {reason:14} {number:,}")
    echo(f"{out}: records.jsonl, rejected.jsonl with reasons, generate.json")


def _worst(reasons: dict[str, int]) -> str:
    worst = sorted(reasons.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{count} x {reason}" for reason, count in worst) or "no more tasks"
