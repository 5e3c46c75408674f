"""A suite: cassettes in a folder, with the tokenizers that they need and the changes accepted since.

    suite.json                  the cases, and the condition that chose them
    cassettes/DIGEST.json       one cassette each, named by its content; never changes
    tokenizers/DIGEST/          tokenizer.json, tokenizer_config.json, chat_template.jinja

A suite holds the environment sections of its runs, with the source code of the user's environments. Playing a
suite runs this code, so play only suites that you trust as much as a recipe.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError

from perilune.errors import RequestError
from perilune.files import read_json, read_regular, sha256_bytes, sha256_file, write_atomic, write_json
from perilune.frozen import Frozen, invalid_value
from perilune.models.text.tokenizer import Tokenizer
from perilune.traces.cassette import SCHEMA_VERSION, Cassette
from perilune.traces.oracle import Expectation, make_expectation

INDEX_FILE = "suite.json"
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Part = Literal["all", "shown", "held-out"]
Model = TypeVar("Model", bound=Frozen)


class Case(Frozen):
    """One cassette of a suite.

    Attributes:
        cause: of the outcome, see `perilune.traces.causes`.
        held_out: whether the case is hidden from developers of the harness.
        accepted: the expectations since an intended change; None: the cassette's own.
    """

    digest: Digest
    cause: str
    held_out: bool = False
    accepted: tuple[Expectation, ...] | None = None


class SuiteIndex(Frozen):
    """The content of suite.json."""

    schema_version: Literal[1] = 1
    where: str = ""
    cases: tuple[Case, ...]


class Suite:
    """A suite on disk.

    Raises:
        RequestError: when suite.json is missing or malformed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = _parse_file(SuiteIndex, root / INDEX_FILE)
        self._tokenizers: dict[str, Tokenizer] = {}

    @cached_property
    def cassettes(self) -> dict[str, Cassette]:
        """The cassettes by digest.

        Raises:
            RequestError: when a file is missing or malformed, or its digest is not its name.
        """
        return {case.digest: self._load_cassette(case.digest) for case in self.index.cases}

    def cases(self, part: Part = "all") -> list[Case]:
        return [case for case in self.index.cases if part == "all" or case.held_out == (part == "held-out")]

    def expected(self, case: Case) -> tuple[Expectation, ...]:
        recorded = self.cassettes[case.digest].tracks
        return tuple(map(make_expectation, recorded)) if case.accepted is None else case.accepted

    def tokenizer(self, digest: str) -> Tokenizer:
        """Return the tokenizer with this digest.

        Raises:
            RequestError: when it is missing or changed.
        """
        if digest not in self._tokenizers:
            if len(digest) != 64 or not digest.isalnum():
                raise RequestError(f"{digest[:80]!r} is not a digest", where=str(self.root))
            folder = self.root / "tokenizers" / digest
            if not folder.is_dir() or tokenizer_digest(folder) != digest:
                what, remedy = "the tokenizer is missing or changed", "record the suite again"
                raise RequestError(what, where=str(folder), remedy=remedy)
            self._tokenizers[digest] = Tokenizer.load(folder)
        return self._tokenizers[digest]

    def accept(self, replayed: Mapping[str, tuple[Expectation, ...]]) -> str:
        """Accept the results of replays, by digest: write suite.json, and return the change as a diff."""
        cases = []
        for case in self.index.cases:
            given = replayed.get(case.digest)
            if given is not None:
                own = tuple(map(make_expectation, self.cassettes[case.digest].tracks))
                case = case.model_copy(update={"accepted": None if given == own else given})  # noqa: PLW2901
            cases.append(case)
        changed = self.index.model_copy(update={"cases": tuple(cases)})
        lines: list[str] = []
        for before, after in zip(self.index.cases, cases, strict=True):
            old, new = (_expected_lines(self.expected(case)) for case in (before, after))
            name = f"{before.digest[:12]} {before.cause}"
            lines += difflib.unified_diff(old, new, name, name, lineterm="", n=2)
        write_json(self.root / INDEX_FILE, changed.model_dump(mode="json"))
        self.index = changed
        return "\n".join(lines)

    def _load_cassette(self, digest: str) -> Cassette:
        path = self.root / "cassettes" / f"{digest}.json"
        document = read_json(path)
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            what = f"the cassette has schema {version!r:.40}, and this version reads schema {SCHEMA_VERSION}"
            raise RequestError(what, where=str(path), remedy="record the suite again")
        cassette = _parse_file(Cassette, path)
        if sha256_bytes(read_regular(path)) != digest:
            what = "the digest of the file is not its name"
            raise RequestError(what, where=str(path), remedy="restore the file")
        return cassette


def write_suite(
    root: Path, cassettes: Sequence[tuple[Case, Cassette]], tokenizers: Mapping[str, Tokenizer], where: str
) -> Suite:
    """Write a suite.

    Raises:
        RequestError: when the folder already has a suite.
    """
    if (root / INDEX_FILE).exists():
        remedy = "give another --out, or remove it"
        raise RequestError("the folder holds a suite", where=str(root), remedy=remedy)
    for _, cassette in cassettes:
        write_atomic(root / "cassettes" / f"{cassette.digest}.json", cassette.to_bytes())
    for digest in {cassette.tokenizer for _, cassette in cassettes}:
        tokenizers[digest].save(root / "tokenizers" / digest)
    index = SuiteIndex(where=where, cases=tuple(case for case, _ in cassettes))
    write_json(root / INDEX_FILE, index.model_dump(mode="json"))
    return Suite(root)


def tokenizer_digest(folder: Path) -> str:
    """Return the SHA-256 over the names and contents of the files of a tokenizer."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    files = [(name, sha256_file(folder / name)) for name in names if (folder / name).is_file()]
    return sha256_bytes(json.dumps(files).encode())


def _expected_lines(expected: Sequence[Expectation]) -> list[str]:
    """Return the expectations of a case for a diff: one line per figure or message."""
    document = [expectation.model_dump(mode="json") for expectation in expected]
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True).splitlines()


def _parse_file(model: type[Model], path: Path) -> Model:
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        raise invalid_value(error, where=str(path)) from None
