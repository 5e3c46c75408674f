"""Compares this harness with another installation of Perilune, such as that of the last release.

The other installation runs `perilune traces run` on episodes that this installation has just played, and
reports the differences.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from perilune.errors import WorkFailedError
from perilune.files import parse_strict_json
from perilune.traces.cassette import Cassette
from perilune.traces.causes import describe_cause
from perilune.traces.replay import TokenizerOf
from perilune.traces.shrink import FailureCheck
from perilune.traces.suite import Case, write_suite

SUITE_TIMEOUT_S = 600


def differs_in_installation(python: Path, tokenizer_of: TokenizerOf, kinds: frozenset[str]) -> FailureCheck:
    """Return a check that another installation plays a cassette with differences of these kinds.

    Args:
        python: the interpreter of the other installation.
        kinds: kinds of `Difference`; empty for any.
    """

    def fails(played: Sequence[Cassette]) -> list[bool]:
        if not played:
            return []
        diff = run_in_installation(python, played, tokenizer_of)
        return [bool(diff[tape.digest] & kinds if kinds else diff[tape.digest]) for tape in played]

    return fails


def run_in_installation(
    python: Path, cassettes: Sequence[Cassette], tokenizer_of: TokenizerOf
) -> dict[str, set[str]]:
    """Return the kinds of differences that another installation finds, by digest of the cassette.

    Raises:
        WorkFailedError: when it cannot run the suite, or not within `SUITE_TIMEOUT_S`.
    """
    with TemporaryDirectory() as folder:
        suite = Path(folder) / "suite"
        distinct = {cassette.digest: cassette for cassette in cassettes}
        cases = [(Case(digest=name, cause=describe_cause(tape)), tape) for name, tape in distinct.items()]
        tokenizers = {cassette.tokenizer: tokenizer_of(cassette.tokenizer) for cassette in cassettes}
        write_suite(suite, cases, tokenizers, "")
        command = [str(python), "-m", "perilune.cli.main", "traces", "run", str(suite), "--json"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        stderr = b""
        try:
            run = subprocess.run(command, env=env, capture_output=True, timeout=SUITE_TIMEOUT_S, check=False)
            stderr = run.stderr
            results = parse_strict_json(run.stdout)["results"]
            return {result["digest"]: {diff["kind"] for diff in result["differences"]} for result in results}
        except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
            reason = stderr.decode(errors="replace")[-300:].strip() or str(error)
            what = f"the other installation cannot run the suite: {reason}"
            remedy = "give the interpreter of an installation that has `perilune traces`"
            raise WorkFailedError(what, where=str(python), remedy=remedy) from None
