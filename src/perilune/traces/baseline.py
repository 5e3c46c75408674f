"""Compares this harness with another installation of Perilune, such as that of the last release.

The other installation runs `perilune traces run` on episodes that this one has just played: where it gives
something else, the two differ.
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

SUITE_TIMEOUT_S = 600  # of one run of the other installation


def differs_in_installation(python: Path, tokenizer_of: TokenizerOf, kinds: frozenset[str]) -> FailureCheck:
    """Return the other installation plays an episode differently, in one of these kinds of differences.

    Args:
        python: the interpreter in which the other installation is.
        kinds: kinds of `Difference`; empty for any.
    """

    def fails(played: Sequence[Cassette]) -> list[bool]:
        if not played:
            return []
        found = run_in_installation(python, played, tokenizer_of)
        return [bool(found[one.digest] & kinds if kinds else found[one.digest]) for one in played]

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
        distinct = {one.digest: one for one in cassettes}
        cases = [(Case(digest=name, cause=describe_cause(one)), one) for name, one in distinct.items()]
        tokenizers = {one.tokenizer: tokenizer_of(one.tokenizer) for one in cassettes}
        write_suite(suite, cases, tokenizers, "")
        command = [str(python), "-m", "perilune.cli.main", "traces", "run", str(suite), "--json"]
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=own, capture_output=True, timeout=SUITE_TIMEOUT_S, check=False)
        try:
            results = parse_strict_json(done.stdout)["results"]
            return {one["digest"]: {it["kind"] for it in one["differences"]} for one in results}
        except (ValueError, KeyError, TypeError):
            said = done.stderr.decode(errors="replace")[-300:].strip()
            raise WorkFailedError(
                f"the other installation cannot run the suite: {said}",
                where=str(python),
                remedy="install a version that has `perilune traces`",
            ) from None
