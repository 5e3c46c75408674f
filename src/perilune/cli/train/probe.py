"""`perilune probe`: find the environments that a checkpoint can learn from by reinforcement learning."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from perilune.cli.arguments import (
    AnswerTokens,
    CheckpointArgument,
    EnvironmentFields,
    EvaluationSeed,
    Json,
    find_checkpoint,
)
from perilune.cli.data.environments import environment_section
from perilune.cli.output import as_markup, echo, interval_markup, make_console, make_table, print_json
from perilune.cli.train.evaluate import run_evaluation
from perilune.environments.core.registry import environment_families
from perilune.errors import PeriluneError, WorkFailedError
from perilune.metrics.learnability import Learnability, assess_learnability


def probe(
    checkpoint: CheckpointArgument,
    *,
    environments: Annotated[
        list[str],
        typer.Option(
            "--environment",
            "-e",
            metavar="ID",
            help="Id of an environment, with its family: reasoning_gym/chain_sum. Without a family: all "
            "families. Repeatable.",
        ),
    ],
    settings: EnvironmentFields = [],  # noqa: B006  # typer reads the default and never changes it
    tasks: Annotated[int, typer.Option(min=2, help="Number of held-out tasks of each environment.")] = 64,
    samples: Annotated[int, typer.Option(min=2, help="Samples for each task, which form a group.")] = 8,
    max_tokens: AnswerTokens = None,
    seed: EvaluationSeed = 0,
    as_json: Json = False,
) -> None:
    """Find out which environments a checkpoint can learn from by reinforcement learning.

    Evaluates the checkpoint in each environment. The verdict is that RL can start, that SFT must come first,
    or that the tasks are already solved. Only groups of answers with different rewards (live groups) have a
    gradient. The same command reuses finished evaluations, so it continues after an interruption.

    \b
    perilune probe ./my-model -e reasoning_gym/chain_sum -e reasoning_gym/spell_backward
    perilune probe quickstart/sft -e calculator --tasks 32 --json
    """
    folder = find_checkpoint(checkpoint)
    fields = {"tasks": tasks, "samples": samples, "max_tokens": max_tokens}
    results: list[tuple[Learnability, str]] = []
    failures: dict[str, PeriluneError] = {}
    names = [name for environment in environments for name in _expand_families(environment)]
    for name in dict.fromkeys(names):
        try:
            section = environment_section(name, settings)
            status = run_evaluation(folder, section, fields, seed, checkpoint)
            results.append((assess_learnability(status.summary), status.run_id))
        except PeriluneError as error:
            failures[name] = error
            echo(f"{name}: {error}", err=True)
    results.sort(key=lambda row: (row[0].live is not None and row[0].live.mean, row[0].pass_at_1.mean))
    results.reverse()
    if as_json:
        print_json(_document(checkpoint, results, failures))
    elif results:
        make_console().print(_table([result for result, _ in results]))
    if len(names) == len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        raise WorkFailedError(
            f"{len(failures)} of {len(names)} environments could not be evaluated", where=next(iter(failures))
        )


def _expand_families(name: str) -> Iterator[str]:
    """Yield the environment itself, or all its families if it has families and none is named."""
    families = () if "/" in name else environment_families(name)
    yield from (f"{name}/{family}" for family in families) if families else (name,)


def _document(
    checkpoint: str, found: Sequence[tuple[Learnability, str]], failures: Mapping[str, PeriluneError]
) -> dict[str, Any]:
    rows = []
    for result, run in found:
        row = asdict(result)
        for name in ("pass_at_1", "pass_at_k", "live"):
            interval = getattr(result, name)
            row[name] = None if interval is None else interval._asdict()
        rows.append(row | {"run": run})
    return {
        "checkpoint": checkpoint,
        "environments": rows,
        "failures": {name: str(error) for name, error in failures.items()},
    }


def _table(rows: Sequence[Learnability]) -> Any:
    figures = ("pass@1", f"pass@{rows[0].k}", "live groups", "in form", "length", "cut off")
    table = make_table("environment", *figures)
    table.add_column("verdict")
    for row in rows:
        form = "" if row.format is None else f"{row.format:.0%}"
        measures = (row.pass_at_1, row.pass_at_k, row.live)
        shares = ("" if measure is None else interval_markup(*measure) for measure in measures)
        cells = (*shares, form, f"{row.length:.1f}", f"{row.truncated:.0%}")
        table.add_row(as_markup(row.environment), *cells, as_markup(row.verdict))
    return table
