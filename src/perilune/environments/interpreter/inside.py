"""Runs an agent's code blocks in one namespace. The sandbox runs this file alone, as its main program.

state.json, removed before the first block:
    prelude: code that runs before the first block, such as definitions of functions.
    blocks: the code so far. Earlier blocks run again, in silence, to restore the variables.
    texts: variable names, and the files with their texts.
    functions: names of the functions that the environment implements.
    results: [call, result] of the calls that the environment has answered.
outcome.json, at the end:
    call: [function, arguments, named arguments] that has no result yet, and ends the run; or
    answer: the variable `answer`, if its "ready" is true.
"""

import json
import linecache
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATE, OUTCOME = "state.json", "outcome.json"


def main() -> None:
    """Run the blocks; the last one may print."""
    state = json.loads(_read_and_delete(STATE))
    results: dict[str, list[Any]] = defaultdict(list)
    for call, result in reversed(state["results"]):
        results[json.dumps(call)].append(result)
    namespace: dict[str, Any] = {"__name__": "__main__", "answer": {"content": "", "ready": False}}
    namespace |= {name: _read_and_delete(file) for name, file in state["texts"].items()}
    namespace |= {name: _make_function(name, results) for name in state["functions"]}
    stdout = sys.stdout
    with Path(os.devnull).open("w") as silence:
        sys.stdout = silence
        _run_block(state["prelude"], "prelude", namespace)
        for number, code in enumerate(state["blocks"], 1):
            sys.stdout = stdout if number == len(state["blocks"]) else silence
            _run_block(code, f"block {number}", namespace)
    answer = namespace.get("answer")
    if isinstance(answer, dict) and answer.get("ready"):
        _write_outcome({"answer": str(answer.get("content", ""))})


def _read_and_delete(file: str) -> str:
    path = Path(file)
    text = path.read_text()
    path.unlink()
    return text


def _make_function(name: str, results: dict[str, list[Any]]) -> Callable[..., Any]:
    def function(*arguments: Any, **named: Any) -> Any:
        call = [name, arguments, named]
        recorded = results[json.dumps(call)]
        if not recorded:
            _write_outcome({"call": call})
            os._exit(0)  # whatever the code would catch
        result = recorded.pop()
        if "error" in result:
            raise RuntimeError(result["error"])
        return result["value"]

    function.__name__ = name
    return function


def _write_outcome(outcome: dict[str, Any]) -> None:
    Path(OUTCOME).write_text(json.dumps(outcome))


def _run_block(code: str, name: str, namespace: dict[str, Any]) -> None:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        exec(compile(code, name, "exec", dont_inherit=True), namespace)  # noqa: S102  # what it is for
    except BaseException as error:
        trace = error.__traceback__
        lines = traceback.format_exception(type(error), error, trace.tb_next if trace else None)
        print(*lines, sep="", end="")


if __name__ == "__main__":
    main()
