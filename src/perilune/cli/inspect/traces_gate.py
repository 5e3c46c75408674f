"""`perilune traces gate`: a checkpoint plays the tasks of a suite live, and may not be worse than another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perilune.cli.arguments import AnswerTokens, CheckpointArgument, EvaluationSeed, Json, find_checkpoint
from perilune.cli.output import echo, print_json

SuiteArgument = Annotated[
    Path, typer.Argument(metavar="SUITE", help="A folder that `traces record` or `traces suite` wrote.")
]
SuitePart = Annotated[Literal["all", "shown", "held-out"], typer.Option(help="Part of the suite to play.")]


def gate_command(
    suite: SuiteArgument,
    checkpoint: CheckpointArgument,
    *,
    against: Annotated[
        str | None,
        typer.Option(metavar="CHECKPOINT", help="Compare with this checkpoint instead of the recording."),
    ] = None,
    loss: Annotated[float, typer.Option(min=0, max=1, help="Tolerated loss of pass@1, such as 0.05.")] = 0.0,
    samples: Annotated[int, typer.Option(min=1, help="Samples for each task.")] = 8,
    part: SuitePart = "all",
    max_tokens: AnswerTokens = None,
    seed: EvaluationSeed = 0,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on the tasks of a suite. Exits with 1 when it is worse than the recording.

    The checkpoint is worse if the whole 95% interval of the change in pass@1, paired by task, lies below
    -LOSS. The evaluations are runs like any other, and the same command reuses finished evaluations.
    """
    from perilune.cli.train.evaluate import run_evaluation
    from perilune.traces.environment import SuiteEnvironment, SuiteSpec

    environment = SuiteEnvironment(SuiteSpec(path=str(suite.absolute()), part=part))
    environment.check_files()
    section = {"id": "suite", "path": str(suite.absolute()), "part": part}
    longest = max(cassette.sampling.max_tokens for cassette in environment.suite.cassettes.values())
    fields = {
        "tasks": environment.settings()["heldout"],
        "samples": samples,
        "max_tokens": max_tokens or longest,
    }
    now, *others = (
        run_evaluation(find_checkpoint(name), section, fields, seed, name).summary
        for name in (checkpoint, *([against] if against else []))
    )
    result = _compare_results(now, others[0] if others else None, seed)
    passed = result["change"]["high"] >= -loss
    if as_json:
        print_json({"checkpoint": checkpoint, "against": against, "loss": loss, "passed": passed, **result})
    else:
        _print(checkpoint, against or "the recording", result)
        echo("passed" if passed else f"FAILED: worse by more than {loss:.1%}")
    if not passed:
        raise typer.Exit(1)


def _compare_results(now: Mapping[str, Any], then: Mapping[str, Any] | None, seed: int) -> dict[str, Any]:
    from perilune.metrics.bootstrap import paired_difference

    if not then:
        recorded = now["recorded"]
        pair = {"now": now["pass@1"], "then": recorded["pass@1"]}
        return {"tasks": recorded["tasks"], **pair, "change": recorded["change"]}
    new, old = ({task: right / n for task, n, right in side["correct_per_task"]} for side in (now, then))
    shared = new.keys() & old.keys()
    change = paired_difference(
        {task: old[task] for task in shared}, {task: new[task] for task in shared}, seed=seed
    )
    pair = {"now": now["pass@1"], "then": then["pass@1"]}
    return {"tasks": len(shared), **pair, "change": change._asdict()}


def _print(checkpoint: str, against: str, found: Mapping[str, Any]) -> None:
    from perilune.metrics.bootstrap import Interval

    for name, rate in ((checkpoint, found["now"]), (against, found["then"])):
        echo(f"pass@1 {Interval(**rate):.1%}  {name}")
    echo(f"paired change {Interval(**found['change']):+.1%} on {found['tasks']} tasks")
