"""A Python interpreter for an agent, whose code may call functions that the environment implements.

Nothing waits inside the sandbox. A run ends at the first call without a result. The environment computes it,
and all blocks run again with the results so far. So an episode needs no process between its turns, and the
same blocks and results always give the same output. Equal runs are made once.
"""

import json
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.environments.core.protocol import EpisodeFailedError
from perilune.environments.interpreter import inside
from perilune.errors import PeriluneError
from perilune.sandbox import Execution, Sandbox, SandboxLimits

_MAX_CACHED_RUNS = 512  # runs; samples of a group often write the same code
_MAX_CACHED_CHARS = 1 << 16  # characters of texts in a run that is remembered

_FOLDER_BYTES = 1 << 16  # bytes of the scratch folder for the program and the folder itself


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function that the environment implements.

    Attributes:
        arguments, named: JSON values, which the agent's code chose.
    """

    function: str
    arguments: Sequence[Any]
    named: Mapping[str, Any]


class InvalidCallError(Exception):
    """A call that cannot be answered; the agent's code sees the reason as a RuntimeError."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a call.

    Attributes:
        error: message of the RuntimeError that it raises instead; empty for none.
    """

    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class BlockResult:
    """The result of a block of code.

    Attributes:
        output: printed text, or the traceback.
        answer: `answer["content"]` as text if `answer["ready"]` is true, else None.
        cause: why it was ended, as in `Execution.cause`; "calls" for too many of them; "results" if they are
            too large, with the arguments. Its variables are then lost.
    """

    output: str
    answer: str | None = None
    cause: str = ""


class CodeRunner:
    """Runs programs in a sandbox, and remembers the outcome of small ones, unless it was a timeout.

    Attributes:
        max_chars: characters of a state and texts that fit into the scratch folder.
    """

    def __init__(self, limits: SandboxLimits, allow_missing: Sequence[str] = ()) -> None:
        self.max_chars = limits.scratch_bytes - _FOLDER_BYTES
        self._sandbox = Sandbox(limits, allow_missing=allow_missing)
        self._program = Path(inside.__file__).read_text()
        self._cache: OrderedDict[tuple[str, tuple[tuple[str, str], ...]], Execution] = OrderedDict()

    def run(self, state: str, texts: tuple[tuple[str, str], ...]) -> Execution:
        """Run `inside.py` with a state and the files that it names.

        Raises:
            EpisodeFailedError: if the sandbox itself fails or lacks a wall.
        """
        if cached := self._cache.get((state, texts)):
            return cached
        execution = self._execute(state, texts)
        is_small = sum(len(text) for _, text in texts) + len(state) < _MAX_CACHED_CHARS
        if is_small and execution.cause != "timeout":  # a busy machine may cause one
            self._cache[state, texts] = execution
            if len(self._cache) > _MAX_CACHED_RUNS:
                self._cache.popitem(last=False)
        return execution

    def close(self) -> None:
        self._sandbox.close()

    def _execute(self, state: str, texts: tuple[tuple[str, str], ...]) -> Execution:
        files = {inside.STATE: state, **dict(texts)}
        try:
            return self._sandbox.run(self._program, {name: text.encode() for name, text in files.items()})
        except PeriluneError as error:
            raise EpisodeFailedError("sandbox", error.what) from None


@dataclass(slots=True)
class Interpreter:
    """The variables of one agent, which last from block to block.

    Attributes:
        texts: variables that hold texts from the beginning.
        functions: names of the functions that blocks may call.
        max_calls: most calls of a block; each runs all blocks again.
        prelude: code that defines further names before the first block.
    """

    runner: CodeRunner
    texts: Mapping[str, str]
    functions: Sequence[str]
    max_calls: int
    prelude: str = ""
    _blocks: list[str] = field(default_factory=list)
    _results: list[tuple[list[Any], dict[str, Any]]] = field(default_factory=list)

    def run(self, code: str) -> Generator[Call, Result, BlockResult]:
        """Run a block: yield its calls one after another, receive their results, and return the result.

        Raises:
            EpisodeFailedError: if the sandbox itself fails.
        """
        result_count = len(self._results)
        self._blocks.append(code)
        while True:
            state = self._state()
            if len(state) + sum(map(len, self.texts.values())) > self.runner.max_chars and self._results:
                return self._discard_block(result_count, "", "results")
            execution = self.runner.run(
                state, tuple((f"{name}.txt", text) for name, text in self.texts.items())
            )
            outcome = _read_outcome(execution)
            if execution.cause:
                return self._discard_block(result_count, execution.output, execution.cause)
            call = _parse_call(outcome, self.functions)
            if call is None:
                answer = outcome.get("answer")
                return BlockResult(execution.output, answer if isinstance(answer, str) else None)
            if len(self._results) - result_count == self.max_calls:
                return self._discard_block(result_count, "", "calls")
            result = yield call
            returned = {"error": result.error} if result.error else {"value": result.value}
            self._results.append(([call.function, call.arguments, call.named], returned))

    def _discard_block(self, result_count: int, output: str, cause: str) -> BlockResult:
        """Forget the last block, so that later ones can run."""
        self._blocks.pop()
        del self._results[result_count:]
        return BlockResult(output, cause=cause)

    def _state(self) -> str:
        state = {
            "prelude": self.prelude,
            "blocks": self._blocks,
            "texts": {name: f"{name}.txt" for name in self.texts},
            "functions": list(self.functions),
            "results": self._results,
        }
        return json.dumps(state)


def _read_outcome(execution: Execution) -> dict[str, Any]:
    """outcome.json, which the agent's code may have written; empty if it is no JSON object."""
    try:
        outcome = json.loads(execution.files.get(inside.OUTCOME, b"{}"))
    except (ValueError, RecursionError):
        return {}
    return outcome if isinstance(outcome, dict) else {}


def _parse_call(outcome: Mapping[str, Any], functions: Sequence[str]) -> Call | None:
    match outcome.get("call"):
        case [str(name), list(arguments), dict(named)] if name in functions:
            return Call(name, arguments, named)
    return None
