"""`perilune traces`: episodes become regression tests of the harness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from perilune.cli.arguments import Json, command_group
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError, WorkFailedError

if TYPE_CHECKING:
    from perilune.cli.inspect.recordings import Recorded
    from perilune.traces.gate import GateReport
    from perilune.traces.suite import Suite

app = command_group("Record episodes as cassettes, and run them as regression tests of the harness.")

SHOWN = 10  # failed cases to print
Targets = Annotated[
    list[str],
    typer.Argument(metavar="EXPERIMENT|RUN|FOLDER...", help="What to record: all their episode files."),
]
SuiteArgument = Annotated[Path, typer.Argument(metavar="SUITE", help="A folder that record or suite wrote.")]
Out = Annotated[Path, typer.Option("--out", help="The folder to write.")]
Where = Annotated[
    str,
    typer.Option(
        metavar="CONDITION",
        help="Which episodes: 'reward_terms.format < 1 and truncated'. Names: reward, truncated, failure, "
        "finish_reason, step, tokens, sampled, text, environment, task_id, episode_id, reward_terms.NAME, "
        "metrics.NAME. Signs: < <= > >= == != and ~ for contains.",
    ),
]
Most = Annotated[int, typer.Option(min=1, help="Most episodes to record of each file, evenly spaced.")]


@app.command("record", epilog="Example: perilune traces record calculator --where 'reward < 1' --out tapes")
def record_command(
    targets: Targets, *, out: Out, where: Where = "", most: Most = 100, as_json: Json = False
) -> None:
    """Record every episode that fulfils a condition, as a suite without clusters.

    A cassette is kept only if it replays exactly now.
    """
    from perilune.cli.inspect.recordings import record_targets
    from perilune.traces.causes import cause
    from perilune.traces.suite import Case, write_suite

    recorded = record_targets(targets, where, most)
    pairs = [(Case(digest=name, cause=cause(one)), one) for name, one in recorded.cassettes.items()]
    suite = write_suite(out, pairs, recorded.tokenizers, where)
    _print_written(suite, recorded, as_json=as_json)


@app.command("suite", epilog="Example: perilune traces suite calculator --where 'reward < 1' --out suite")
def suite_command(
    targets: Targets,
    *,
    out: Out,
    where: Where = "",
    each: Annotated[int, typer.Option(min=1, help="Cassettes to keep of each cause.")] = 1,
    hold_out: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the suite that is held out.")
    ] = 0.0,
    most: Most = 1000,
    as_json: Json = False,
) -> None:
    """Record episodes, cluster them by the cause of their outcome, and keep the smallest of each cause."""
    from perilune.cli.inspect.recordings import record_targets
    from perilune.traces.causes import choose, clusters, held_out
    from perilune.traces.suite import Case, write_suite

    recorded = record_targets(targets, where, most)
    chosen = choose(clusters(list(recorded.cassettes.values())), each)
    pairs = [
        (Case(digest=one.digest, cause=name, held_out=held_out(one.digest, hold_out)), one)
        for name, members in chosen.items()
        for one in members
    ]
    suite = write_suite(out, pairs, recorded.tokenizers, where)
    _print_written(suite, recorded, as_json=as_json)


@app.command("run", epilog="Example: perilune traces run suite --json")
def run_command(
    suite: SuiteArgument,
    *,
    mode: Annotated[
        Literal["harness", "rescore", "exact"],
        typer.Option(
            help="harness: the model's turns from the tape, all else live. rescore: the verifier alone. "
            "exact: the model live, and its tokens must be equal."
        ),
    ] = "harness",
    part: Annotated[
        Literal["all", "shown", "held-out"], typer.Option(help="The part of the suite to run.")
    ] = "all",
    checkpoint: Annotated[
        str | None, typer.Option(help="Weights for exact: a folder, or a run; by digest the recorded ones.")
    ] = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Expect from now on what the replays gave; print the change.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Play a suite and compare with what was recorded. Exit code 1 when a case differs.

    Differences are of rewards, reward terms, metrics, observations, their tokens, and the end of the episode.
    """
    from perilune.traces.gate import run_suite
    from perilune.traces.suite import Suite

    opened = Suite(suite)
    if mode == "exact":
        _run_exact(opened, checkpoint, as_json=as_json)
        return
    report = run_suite(opened, mode, part)
    diff = None
    if accept:
        if mode != "harness":
            raise RequestError("--accept takes what mode harness gives", where="--mode", remedy="remove --mode")
        if stopped := [one for one in report.failed if one.replay.error]:
            raise WorkFailedError(
                f"{len(stopped)} replays stopped: {stopped[0].replay.error}", remedy="fix this first"
            )
        diff = opened.accept({one.case.digest: one.replay.expectations() for one in report.failed})
    if as_json:
        print_json(report.document() | ({} if diff is None else {"accepted": diff}))
    else:
        _print_report(report)
        if diff is not None:
            echo(diff or "nothing to accept")
    if report.failed and not accept:
        raise typer.Exit(1)


def _print_written(suite: Suite, recorded: Recorded, *, as_json: bool) -> None:
    if as_json:
        cases = [case.model_dump(mode="json", exclude={"accepted"}) for case in suite.index.cases]
        print_json({"suite": str(suite.root), "cases": cases, "refused": dict(recorded.refused)})
        return
    echo(f"{suite.root}: {len(suite.index.cases)} of {len(recorded.cassettes)} recorded episodes")
    causes: dict[str, int] = {}
    for case in suite.index.cases:
        causes[case.cause] = causes.get(case.cause, 0) + 1
    for name, count in causes.items():
        echo(f"  {count:5}  {name}")
    for reason, count in recorded.refused.most_common():
        echo(f"  {count} not recorded: {reason}")
    echo(f"  next: perilune traces run {suite.root}")


def _print_report(report: GateReport) -> None:
    for one in report.failed[:SHOWN]:
        echo(f"FAILED {one.case.digest[:12]} {one.episode_id}  {one.case.cause}")
        for difference in one.differences[:3]:
            echo(f"  {difference}")
    if len(report.failed) > SHOWN:
        echo(f"... and {len(report.failed) - SHOWN} more")
    passed = len(report.results) - len(report.failed)
    echo(f"{passed} of {len(report.results)} cases passed ({report.mode})")
    if report.change is not None and report.recorded is not None and report.replayed is not None:
        echo(
            f"mean reward {report.recorded.mean:.3f} recorded, {report.replayed.mean:.3f} replayed, paired "
            f"change {report.change.mean:+.3f} ({report.change.low:+.3f} to {report.change.high:+.3f})"
        )


def _run_exact(suite: Suite, checkpoint: str | None, *, as_json: bool) -> None:
    raise RequestError("not yet")
