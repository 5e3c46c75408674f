"""Compares this harness with another installation of Perilune, such as that of the last release.

The other installation runs `perilune traces run` on episodes that this one has just played, and reports the
differences.
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

SUITE_TIMEOUT_S = 600  # time limit of one run of the other installation


def differs_in_installation(python: Path, tokenizer_of: TokenizerOf, kinds: frozenset[str]) -> FailureCheck:
    """Return a check: does the other installation play a cassette with differences of these kinds?

    Args:
        python: the interpreter in which the other installation is.
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
        WorkFailedError: when it cannot run the suite.
    """
    with TemporaryDirectory() as folder:
        suite = Path(folder) / "suite"
        distinct = {cassette.digest: cassette for cassette in cassettes}
        cases = [(Case(digest=name, cause=describe_cause(tape)), tape) for name, tape in distinct.items()]
        tokenizers = {cassette.tokenizer: tokenizer_of(cassette.tokenizer) for cassette in cassettes}
        write_suite(suite, cases, tokenizers, "")
        command = [str(python), "-m", "perilune.cli.main", "traces", "run", str(suite), "--json"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        process = subprocess.run(command, env=env, capture_output=True, timeout=SUITE_TIMEOUT_S, check=False)
        try:
            results = parse_strict_json(process.stdout)["results"]
            return {result["digest"]: {diff["kind"] for diff in result["differences"]} for result in results}
        except (ValueError, KeyError, TypeError):
            stderr = process.stderr.decode(errors="replace")[-300:].strip()
            raise WorkFailedError(
                f"the other installation cannot run the suite: {stderr}",
                where=str(python),
                remedy="install a version that has `perilune traces`",
            ) from None
