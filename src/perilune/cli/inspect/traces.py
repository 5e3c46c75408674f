"""`perilune traces`: episodes become regression tests of the harness."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from perilune.bundle.digest import contents_digest, source_files
from perilune.cli.arguments import (
    WHERE_HELP,
    Json,
    check_output_file,
    check_output_folder,
    find_checkpoint,
    make_command_group,
)
from perilune.cli.inspect.traces_gate import SuiteArgument, SuitePart, gate_command
from perilune.cli.output import echo, print_json
from perilune.errors import RequestError, WorkFailedError
from perilune.files import sha256_file, write_json
from perilune.plural import plural

if TYPE_CHECKING:
    from perilune.cli.inspect.recordings import RecordedEpisodes
    from perilune.engine.engine import Engine
    from perilune.traces.gate import GateReport
    from perilune.traces.shrink import FailureCheck
    from perilune.traces.suite import Part, Suite

app = make_command_group(
    "Record episodes as cassettes, and run them as regression tests of environments and rewards."
)
app.command("gate", epilog="Example: perilune traces gate suite calculator/rl --against calculator/sft")(
    gate_command
)

MAX_SHOWN = 10  # failed cases to print
Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="EXPERIMENT|RUN|FOLDER...", help="Experiments, runs or folders whose episodes to read."
    ),
]
Out = Annotated[Path, typer.Option("--out", callback=check_output_folder, help="Folder to write.")]
Where = Annotated[
    str,
    typer.Option(
        metavar="CONDITION",
        help=f"Condition on episodes: 'reward_terms.format < 1 and truncated'. {WHERE_HELP}",
    ),
]
Most = Annotated[int, typer.Option(min=1, help="Maximum number of episodes per file, at even intervals.")]


@app.command("record", epilog="Example: perilune traces record calculator --where 'reward < 1' --out tapes")
def record_command(
    targets: Targets, *, out: Out, where: Where = "", most: Most = 100, as_json: Json = False
) -> None:
    """Record every episode that matches a condition, as a suite without clusters.

    Keeps only cassettes whose replay now gives exactly the recorded result.
    """
    from perilune.cli.inspect.recordings import record_targets
    from perilune.traces.causes import describe_cause
    from perilune.traces.suite import Case, write_suite

    recorded = record_targets(targets, where, most)
    _require_cassettes(recorded, targets)
    pairs = [(Case(digest=key, cause=describe_cause(item)), item) for key, item in recorded.cassettes.items()]
    suite = write_suite(out, pairs, recorded.tokenizers, where)
    _print_written(suite, recorded, as_json=as_json)


@app.command("suite", epilog="Example: perilune traces suite calculator --where 'reward < 1' --out suite")
def suite_command(
    targets: Targets,
    *,
    out: Out,
    where: Where = "",
    each: Annotated[int, typer.Option(min=1, help="Number of cassettes to keep of each cluster.")] = 1,
    hold_out: Annotated[float, typer.Option(min=0, max=1, help="Share of the suite that is held out.")] = 0.0,
    most: Most = 1000,
    as_json: Json = False,
) -> None:
    """Record episodes, cluster them by the cause of their outcome, and keep the smallest of each cluster."""
    from perilune.cli.inspect.recordings import record_targets
    from perilune.traces.causes import choose_cassettes, cluster_cassettes, is_held_out
    from perilune.traces.suite import Case, write_suite

    recorded = record_targets(targets, where, most)
    _require_cassettes(recorded, targets)
    chosen = choose_cassettes(cluster_cassettes(list(recorded.cassettes.values())), each)
    pairs = [
        (Case(digest=cassette.digest, cause=name, held_out=is_held_out(cassette.digest, hold_out)), cassette)
        for name, members in chosen.items()
        for cassette in members
    ]
    suite = write_suite(out, pairs, recorded.tokenizers, where)
    _print_written(suite, recorded, as_json=as_json)


@app.command("export", epilog="Example: perilune traces export calculator/after_rl --out spans.json")
def export_command(
    targets: Targets,
    *,
    out: Annotated[Path, typer.Option("--out", callback=check_output_file, help="File to write.")],
    where: Where = "",
    texts: Annotated[bool, typer.Option(help="Include what the agents read and wrote.")] = False,
    as_json: Json = False,
) -> None:
    """Write episodes as OpenTelemetry spans (OTLP, JSON), which tracing tools show.

    Agents and turns follow the conventions for generative AI. Each round of turns counts as one second, and
    the first round begins at the time of the episode file.
    """
    from perilune.cli.inspect.recordings import fitting_episodes
    from perilune.traces.otlp import trace_request

    spans: list[dict[str, Any]] = []
    episodes = 0
    for path, chosen in fitting_episodes(targets, where):
        request = trace_request(chosen, path.stat().st_mtime_ns, sha256_file(path), texts=texts)
        spans += request["resourceSpans"]
        episodes += len(chosen)
    write_json(out, {"resourceSpans": spans})
    count = sum(len(scope["spans"]) for resource in spans for scope in resource["scopeSpans"])
    if as_json:
        print_json({"file": str(out), "episodes": episodes, "spans": count})
    else:
        echo(f"{count} spans of {episodes} episodes are in {out}")


@app.command("run", epilog="Example: perilune traces run suite --json")
def run_command(
    suite: SuiteArgument,
    *,
    mode: Annotated[
        Literal["harness", "rescore", "exact"],
        typer.Option(
            help="harness: replay the model's recorded turns, and run everything else. rescore: run only the "
            "verifier. exact: run the model too, which must sample the recorded tokens."
        ),
    ] = "harness",
    part: SuitePart = "all",
    checkpoint: Annotated[str | None, typer.Option(help="The weights for exact: a folder or a run.")] = None,
    accept: Annotated[
        bool,
        typer.Option("--accept", help="Accept the new results as the expected ones, and print the change."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Play a suite and compare the results with the recording. Exits with 1 when a case differs.

    Compares rewards, reward terms, metrics, observations, their tokens, and how the episode ended.
    """
    from perilune.traces.gate import run_suite
    from perilune.traces.suite import Suite

    opened = Suite(suite)
    if mode == "exact":
        _run_exact(opened, part, checkpoint, as_json=as_json)
        return
    report = run_suite(opened, mode, part)
    diff = None
    if accept:
        if mode != "harness":
            raise RequestError(
                "--accept accepts the results of mode harness only", where="--mode", remedy="remove --mode"
            )
        if stopped := [result for result in report.failed if result.replay.error]:
            raise WorkFailedError(
                f"{len(stopped)} replays stopped: {stopped[0].replay.error}",
                remedy="correct the cause, then repeat --accept",
            )
        diff = opened.accept({result.case.digest: result.replay.expectations() for result in report.failed})
    if as_json:
        print_json(report.document() | ({} if diff is None else {"accepted": diff}))
    else:
        _print_report(report)
        if diff is not None:
            echo(diff or "nothing to accept")
    if report.failed and not accept:
        raise typer.Exit(1)


@app.command("fork", epilog="Example: perilune traces fork suite 3f9a --after 1 --checkpoint calculator/sft")
def fork_command(
    suite: SuiteArgument,
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="First characters of a cassette's digest.")],
    *,
    after: Annotated[
        int, typer.Option(min=0, help="Number of turns of all agents to take from the recording.")
    ],
    checkpoint: Annotated[str | None, typer.Option(help="The weights: a folder or a run.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=4096, help="Number of continuations to sample.")] = 16,
    as_json: Json = False,
) -> None:
    """Replay an episode up to a turn, sample continuations, and report how often they succeed."""
    from perilune.metrics.proportion import pass_rate_interval
    from perilune.traces.replay import Replayer
    from perilune.traces.suite import Suite

    opened = Suite(suite)
    fitting = [cassette for name, cassette in opened.cassettes.items() if name.startswith(digest)]
    if len(fitting) != 1:
        raise RequestError(f"{len(fitting)} cassettes start with '{digest}'", where=str(suite))
    engine, _ = _engine(opened, checkpoint)
    with Replayer(opened.tokenizer) as replayer:
        replays = replayer.fork(fitting[0], after, samples, engine)
    rewards = [replay.tracks[0].verdict.reward for replay in replays if replay.tracks]
    scored = [reward for reward in rewards if reward is not None]
    rate = pass_rate_interval([float(reward >= 1) for reward in scored]) if scored else None
    recorded = fitting[0].tracks[0].verdict.reward
    document = {
        "digest": fitting[0].digest,
        "after": after,
        "samples": samples,
        "failed": samples - len(scored),
        "recorded": recorded,
        "pass_rate": rate and rate._asdict(),
        "rewards": rewards,
    }
    if as_json:
        print_json(document)
        return
    text = f"{rate:.1%}" if rate else "no score"
    echo(f"{samples} continuations after turn {after}: pass rate {text}, recorded reward {recorded}")


@app.command("shrink", epilog="Example: perilune traces shrink suite --out small")
def shrink_command(
    suite: SuiteArgument,
    digest: Annotated[
        str, typer.Argument(metavar="DIGEST", help="First characters of the digest of one cassette.")
    ] = "",
    *,
    out: Out,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help="Interpreter of an installation in which the suite passes. Shrinks the cases that fail "
            "here, while the results of the two installations differ.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Cut turns and text from cassettes while they still fail in the same way, and write a smaller suite.

    Without --baseline, each cassette keeps the cause of its outcome. Perilune plays every candidate, so each
    result is an episode that the current harness produces.
    """
    from perilune.traces.causes import describe_cause
    from perilune.traces.replay import Replayer
    from perilune.traces.shrink import Shrinker, has_same_cause
    from perilune.traces.suite import Case, Suite, write_suite

    opened = Suite(suite)
    chosen = {name: cassette for name, cassette in opened.cassettes.items() if name.startswith(digest)}
    fails = {name: has_same_cause(cassette) for name, cassette in chosen.items()}
    if baseline is not None:
        fails = _differing(opened, baseline, set(chosen))
    if not fails:
        what = "no case fails here" if baseline else f"no cassette starts with '{digest}'"
        raise RequestError(what, where=str(suite))
    with Replayer(opened.tokenizer) as replayer:
        small = {name: Shrinker(check, replayer).shrink(chosen[name]) for name, check in fails.items()}
    pairs = {new.digest: (Case(digest=new.digest, cause=describe_cause(new)), new) for new in small.values()}
    names = {new.tokenizer for new in small.values()}
    write_suite(out, list(pairs.values()), {name: opened.tokenizer(name) for name in names}, "")
    before = {name: chosen[name].tokens for name in small}
    share = sum(new.tokens / before[name] for name, new in small.items()) / len(small)
    if as_json:
        rows = [
            {"digest": name, "tokens": before[name], "shrunk": new.digest, "shrunk_tokens": new.tokens}
            for name, new in small.items()
        ]
        print_json({"suite": str(out), "mean_share_of_tokens": share, "cassettes": rows})
        return
    for name, new in small.items():
        echo(f"{name[:12]} {before[name]} tokens -> {new.digest[:12]} {new.tokens} tokens")
    echo(f"{out}: {plural(len(pairs), 'cassette')}, on average {share:.0%} of their tokens")


def _differing(suite: Suite, baseline: Path, names: set[str]) -> dict[str, FailureCheck]:
    """Return the cases that fail here, each with the test that another installation plays it differently."""
    from perilune.traces.baseline import differs_in_installation
    from perilune.traces.gate import run_suite

    failed = [result for result in run_suite(suite).failed if result.case.digest in names]
    return {
        result.case.digest: differs_in_installation(
            baseline, suite.tokenizer, frozenset(difference.kind for difference in result.differences)
        )
        for result in failed
    }


def _require_cassettes(recorded: RecordedEpisodes, targets: list[str]) -> None:
    """Refuse to write a suite without cases.

    Raises:
        RequestError: naming why no episode could be recorded.
    """
    if not recorded.cassettes:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in recorded.refused.most_common())
        raise RequestError(
            f"no episode can be recorded: {reasons}",
            where=", ".join(targets),
            remedy="record another stage, or other episodes with --where",
        )


def _print_written(suite: Suite, recorded: RecordedEpisodes, *, as_json: bool) -> None:
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
    echo(f"  next: perilune traces run {shlex.quote(str(suite.root))}")


def _print_report(report: GateReport) -> None:
    for result in report.failed[:MAX_SHOWN]:
        echo(f"FAILED {result.case.digest[:12]} {result.episode_id}  {result.case.cause}")
        for difference in result.differences[:3]:
            echo(f"  {difference}")
    if len(report.failed) > MAX_SHOWN:
        echo(f"... and {len(report.failed) - MAX_SHOWN} more")
    passed = len(report.results) - len(report.failed)
    echo(f"{passed} of {len(report.results)} cases passed ({report.mode})")
    if report.change is not None and report.recorded is not None and report.replayed is not None:
        echo(
            f"mean reward {report.recorded.mean:.3f} recorded, {report.replayed.mean:.3f} replayed, paired "
            f"change {report.change:+.3f}"
        )


def _run_exact(suite: Suite, part: Part, checkpoint: str | None, *, as_json: bool) -> None:
    """Sample the cases that the checkpoint's weights sampled, and compare tokens."""
    from perilune.traces.oracle import find_token_differences
    from perilune.traces.replay import Replayer

    engine, digest = _engine(suite, checkpoint)
    cassettes = [suite.cassettes[case.digest] for case in suite.cases(part)]
    own = [item for item in cassettes if item.checkpoint == digest and item.shrunk_from is None]
    if not own:
        raise RequestError(
            f"these weights ({digest[:12]}) sampled no cassette of the suite",
            where="--checkpoint",
            remedy="the checkpoint of the recorded evaluation, or the one that training started from",
        )
    results = []
    with Replayer(suite.tokenizer) as replayer:
        replays = replayer.exact(own, engine)
    for item, replay in zip(own, replays, strict=True):
        found = replay.differences(()) if replay.error else find_token_differences(item.tracks, replay.tracks)
        results.append((item, found))
    failed = [(item, found) for item, found in results if found]
    if as_json:
        listed = [
            {"digest": item.digest, "passed": not found, "differences": list(map(asdict, found))}
            for item, found in results
        ]
        counts = {"cases": len(own), "failed": len(failed), "other_weights": len(cassettes) - len(own)}
        print_json({"mode": "exact", **counts, "results": listed})
    else:
        for item, found in failed[:MAX_SHOWN]:
            echo(f"FAILED {item.digest[:12]} {item.source.episode_id}\n  {found[0]}")
        echo(f"{len(own) - len(failed)} of {len(own)} cases have the recorded tokens (exact)")
        if len(own) < len(cassettes):
            echo(f"{len(cassettes) - len(own)} cases were sampled by other weights")
    if failed:
        raise typer.Exit(1)


def _engine(suite: Suite, checkpoint: str | None) -> tuple[Engine, str]:
    from perilune.models.checkpoints.stored import open_checkpoint
    from perilune.tasks.stage.memory_plan import make_engine

    if checkpoint is None:
        raise RequestError(
            "sampling needs the weights of the model", where="--checkpoint", remedy="name a run or a folder"
        )
    folder = find_checkpoint(checkpoint)
    digest = contents_digest([(name, sha256_file(path)) for name, path in source_files(folder)])
    longest = max(cassette.tokens + cassette.sampling.max_tokens for cassette in suite.cassettes.values())
    decoder, tokenizer = open_checkpoint(folder)
    return make_engine(decoder, longest, tokenizer), digest
