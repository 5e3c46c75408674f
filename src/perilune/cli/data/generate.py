"""`perilune data generate`: records that a teacher or a model writes, scored by the environment."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perilune.cli.arguments import (
    EnvironmentFields,
    EvaluationSeed,
    Json,
    SplitOption,
    check_output_folder,
    find_checkpoint,
)
from perilune.cli.console import make_stage_progress
from perilune.cli.data.environments import environment_section, parse_settings
from perilune.cli.output import echo, print_json
from perilune.data.generators import make_teacher
from perilune.environments.core.registry import make_environment
from perilune.errors import RequestError, UserInterruptError, WorkFailedError
from perilune.extensions import CodeFile, is_file_reference
from perilune.recipe.reward_files import read_source_file

if TYPE_CHECKING:
    from perilune.data.generation import Generator

EnvironmentId = Annotated[
    str,
    typer.Argument(
        metavar="ENVIRONMENT", help="Id of an environment, with its family: reasoning_gym/chain_sum."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER", callback=check_output_folder, help="Folder for records.jsonl and rejected.jsonl."
    ),
]
TeacherOptions = Annotated[
    list[str], typer.Option("--option", metavar="KEY=VALUE", help="Set an option of the teacher. Repeatable.")
]
Strategies = Annotated[
    list[str],
    typer.Option(
        "--strategy",
        metavar="NAME=SHARE",
        help="Set the share of a strategy. Default: the teacher's shares. Repeatable.",
    ),
]
ModelCheckpoint = Annotated[
    str,
    typer.Option(
        metavar="CHECKPOINT",
        help="Model that writes the records instead of a teacher: a Hugging Face folder, or a run.",
    ),
]
Tasks = Annotated[
    int | None, typer.Option(min=1, help="Number of tasks to use. Default: as many as --count needs.")
]


def generate(
    environment: EnvironmentId,
    out: Out,
    *,
    teacher: Annotated[
        str, typer.Option(help="Teacher that writes the records: a name, or file.py:Class.")
    ] = "",
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
    options: TeacherOptions = [],  # noqa: B006  # likewise
    strategies: Strategies = [],  # noqa: B006  # likewise
    model: ModelCheckpoint = "",
    samples: Annotated[int, typer.Option(min=1, help="Number of the model's answers to each task.")] = 4,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of the model's answers in tokens.")
    ] = 64,
    temperature: Annotated[float, typer.Option(min=0.01, help="Sampling temperature of the model.")] = 1.0,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Number of records.")] = 1000,
    tasks: Tasks = None,
    split: SplitOption = "train",
    seed: EvaluationSeed = 0,
    as_json: Json = False,
) -> None:
    """Let a teacher or a model write records for the tasks of an environment.

    The environment scores each record; rejected ones go to rejected.jsonl. After an interruption, the same
    command resumes and produces the same files.
    """
    if bool(teacher) == bool(model):
        raise RequestError("give either --teacher or --model")
    from perilune.data import generation
    from perilune.data.generators.collection import TeacherGenerator
    from perilune.verifiers import Scorer

    section = environment_section(environment, settings)
    instance = make_environment(section)
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(section))
        generator: Generator
        if teacher:
            extra = parse_settings(options, "--option")
            code = read_source_file(teacher, Path.cwd(), "--teacher") if is_file_reference(teacher) else None
            named = teacher if code is None else CodeFile(name=teacher, source=code)
            writer = make_teacher(named, parse_settings(strategies, "--strategy"), extra)
            details = {"options": extra, **({} if code is None else {"code": code})}
            generator = TeacherGenerator(writer, instance, scorer.score, seed, section=section, extra=details)
        else:
            from perilune.tasks.datasets.sampled import Sampled, Sampling  # needs torch

            sampling = Sampling(samples, max_tokens, temperature, seed)
            generator = Sampled.open(find_checkpoint(model), section, instance, scorer, sampling)
        view = make_stage_progress()
        stack.enter_context(view)
        view.start("generate", "")

        def show(kept: int, rejected: int) -> None:
            view.update("generate", kept, count, "records", {"rejected": rejected})

        target = generation.GenerationTarget(count, tasks, seed, split)
        try:
            totals = generation.generate_records(generator, instance.tasks(split, seed), target, out, show)
        except KeyboardInterrupt:
            remedy = "run the same command again; it continues where it stopped"
            raise UserInterruptError("interrupted", remedy=remedy) from None
        view.end("generate", "done", "")
    _print_report({"environment": instance.id, **totals}, out, as_json)
    if totals["rows"] < (count if tasks is None else 1):
        goal = f"{count} records were kept" if tasks is None else f"{totals['tasks']} tasks gave a record"
        reasons = Counter(totals["reasons"]).most_common(3)
        worst = ", ".join(f"{number} x {reason}" for reason, number in reasons) or "no more tasks"
        raise WorkFailedError(
            f"{totals['rows']} of {goal} ({worst})",
            where=str(out / generation.REJECTED_FILE),
            remedy="lower --count, or change the environment, the teacher or its options",
        )


def _print_report(report: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    echo(f"{report['rows']:,} records of {report['environment']}, {report['rejected']:,} rejected")
    for source, number in report["sources"].items():
        echo(f"  {source:24} {number:,}")
    for reason, number in report["reasons"].items():
        echo(f"  rejected: {reason:14} {number:,}")
    echo(f"wrote records.jsonl, rejected.jsonl and generate.json to {out}")
