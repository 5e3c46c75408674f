"""The two ways to use the search stack: from code, and with single calls whose results enter the context."""

import ast
from typing import Any

from perilune.environments.builtin.tool_calls import ANSWER_MARK, Answer, InvalidAction
from perilune.environments.interpreter import actions
from perilune.environments.interpreter import prompts as interpreter_prompts
from perilune.environments.interpreter.interpreter import (
    BlockResult,
    Call,
    CodeRunner,
    Interpreter,
    InvalidCallError,
    Result,
)
from perilune.environments.search import prompts
from perilune.environments.search.corpus import Document
from perilune.environments.search.stack import FUNCTIONS_SOURCE, HOSTED_FUNCTIONS, SearchStack

_MAX_CALL_CHARS = 4000  # characters of a compact call


class CodeAgent:
    """Runs blocks of Python in the sandbox. The agent sees their output."""

    def __init__(
        self,
        runner: CodeRunner,
        stack: SearchStack,
        style: prompts.Style,
        max_calls: int,
        max_output_chars: int,
    ) -> None:
        self._stack, self._style, self._max_output_chars = stack, style, max_output_chars
        self._interpreter = Interpreter(runner, {}, HOSTED_FUNCTIONS, max_calls, prelude=FUNCTIONS_SOURCE)
        self.counts = {"blocks": 0.0}

    def take(self, text: str) -> Answer | str:
        """Return the answer that ends the episode, or the text that the agent sees."""
        action = actions.parse_action(text, "python", self._style)
        if isinstance(action, Answer):
            return action
        if not isinstance(action, actions.Code):
            return f"error: {action.reason if isinstance(action, InvalidAction) else 'the tool is Python'}"
        block = self._run(action.text)
        self.counts["blocks"] += 1
        if block.cause:
            contained = f"contained/{block.cause}"
            self.counts[contained] = self.counts.get(contained, 0.0) + 1
        if block.answer is not None:
            return Answer(block.answer)
        return interpreter_prompts.render_output(self._style, block, self._max_output_chars)

    def _run(self, code: str) -> BlockResult:
        running = self._interpreter.run(code)
        try:
            call = next(running)
            while True:
                try:
                    result = Result(self._stack.call(call.function, call.arguments, call.named))
                except InvalidCallError as error:
                    result = Result(error=str(error))
                call = running.send(result)
        except StopIteration as end:
            block: BlockResult = end.value
            return block


class CallAgent:
    """Answers one function call a turn. The agent sees the beginning of its result."""

    def __init__(self, stack: SearchStack, style: prompts.Style, max_output_chars: int) -> None:
        self._stack, self._style, self._max_output_chars = stack, style, max_output_chars
        self._last: list[Document] = []
        self.counts = {"calls": 0.0}

    def take(self, text: str) -> Answer | str:
        action = _parse_single_call(text, compact=self._style == "compact")
        if isinstance(action, Answer):
            return action
        if isinstance(action, InvalidAction):
            return f"error: {action.reason}"
        self.counts["calls"] += 1
        try:
            result = self._call(action.function, list(action.arguments), dict(action.named))
        except InvalidCallError as error:
            return f"error: {error}"
        if action.function != "extract":
            self._last = result
        return prompts.render_list(self._style, result, self._max_output_chars)

    def _call(self, name: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        if name not in self._stack.functions:
            raise InvalidCallError(f"there is no function {name}")
        if name not in ("search", "fan_out"):
            arguments = [self._select_documents(named.pop("documents", None)), *arguments]
        return self._stack.call(name, arguments, named)

    def _select_documents(self, numbers: Any) -> list[Document]:
        if numbers is None:
            return self._last
        valid = range(1, len(self._last) + 1)
        if not isinstance(numbers, list) or not all(
            type(number) is int and number in valid for number in numbers
        ):
            raise InvalidCallError(f"documents is a list of numbers up to {len(self._last)}")
        return [self._last[number - 1] for number in numbers]


def _parse_single_call(text: str, *, compact: bool) -> Call | Answer | InvalidAction:
    """Parse an action that is one function call or an answer. Only its first call counts.

    Natural: `<tool_call>{"name": "search", "arguments": {"query": "...", "k": 5}}</tool_call>`, or
    `<answer>...</answer>`. Compact, for character-level models: `search('...',5)`, or `;...`.
    """
    if compact:
        if text.startswith(ANSWER_MARK):
            return Answer(text.removeprefix(ANSWER_MARK))
        return _parse_compact(text)
    return actions.parse_call(text)


def _parse_compact(text: str) -> Call | InvalidAction:
    try:
        call = ast.parse(text[:_MAX_CALL_CHARS].strip(), mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            arguments = [ast.literal_eval(arg) for arg in call.args]
            named = {arg.arg: ast.literal_eval(arg.value) for arg in call.keywords if arg.arg}
            return Call(call.func.id, arguments, named)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    return InvalidAction("not a call of one function with literal arguments")
