"""Training examples in the column conventions of TRL, and in Perilune's own records.

A demonstration is a row with `messages`, with ShareGPT's `conversations`, with `prompt` and `completion`, or
with `text`. A preference is a row with `chosen` and `rejected`, with `prompt` or without. Prompts and answers
are text or lists of messages.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perilune.data.chat_format import ROLES, from_sharegpt, read_content
from perilune.data.preferences import parse_preference
from perilune.data.records import record_from_row
from perilune.data.sources import Row
from perilune.errors import RequestError
from perilune.files import canonical_json, parse_strict_json, sha256_bytes

Message = dict[str, Any]

DEMONSTRATION_COLUMNS = "messages, prompt and completion, or text"
PREFERENCE_COLUMNS = "chosen and rejected, with prompt or without"
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # that templates define


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the model's chat template.

    Attributes:
        opening: the messages before the first message to imitate.
        turns: the remaining messages. The first is the assistant's.
        variables: further inputs of the template: `tools`, and those of the column `chat_template_kwargs`.
    """

    opening: tuple[Message, ...]
    turns: tuple[Message, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text that is tokenized without a chat template. Spelled-out control tokens become control tokens.

    Attributes:
        prompt: text without loss; if empty, every token but the first is learned.
    """

    prompt: str
    completion: str


Example = Conversation | PlainText


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt.

    Attributes:
        task_id: equal for equal prompts.
        scores: of the chosen and the rejected answer; None where the row has none.
    """

    chosen: Example
    rejected: Example
    task_id: str
    scores: tuple[float, float] | None = None


def read_demonstration(row: Row) -> Example:
    """Return the example to imitate in a row of an sft stage.

    Raises:
        RequestError: naming the row and the column.
    """
    value = row.value
    if "messages" in value and "digest" in value:
        record = record_from_row(value, row.place)
        return _make_conversation(record.messages, {}, row.place)
    for name in ("messages", "conversations"):
        if name in value:
            return _make_conversation(_read_messages(value, name, row.place), _read_variables(row), row.place)
    if "prompt" in value and "completion" in value:
        return _read_answer(row, "completion")
    if "text" in value:
        return PlainText("", _read_text(value, "text", row.place))
    raise _column_error(row, "sft", DEMONSTRATION_COLUMNS, "preference" if "chosen" in value else "")


def read_comparison(row: Row) -> Comparison:
    """Return the two answers in a row of a stage that trains on preferences.

    Raises:
        RequestError: naming the row and the column.
    """
    value = row.value
    if "chosen" not in value or "rejected" not in value:
        is_other = "messages" in value or "text" in value or "completion" in value
        raise _column_error(row, "preference", PREFERENCE_COLUMNS, "sft" if is_other else "")
    if "digest" in value:
        pair = parse_preference(value, row.place)
        better, worse = (Conversation(pair.prompt, side) for side in (pair.chosen, pair.rejected))
        return Comparison(better, worse, pair.task_id, (pair.chosen_score, pair.rejected_score))
    prompt = value.get("prompt")
    if prompt is None or (isinstance(prompt, str) and isinstance(value["chosen"], list)):
        row = _extract_prompt(row)
    chosen, rejected = (_read_answer(row, name) for name in ("chosen", "rejected"))
    return Comparison(chosen, rejected, sha256_bytes(canonical_json(row.value["prompt"]))[:32])


def _read_answer(row: Row, name: str) -> Example:
    """Return the prompt with the answer in the column `name`; both are text, or both are messages."""
    value = row.value
    prompt = value["prompt"]
    if isinstance(prompt, str) and isinstance(value[name], str):
        return PlainText(prompt, value[name])
    if not (isinstance(prompt, list) and isinstance(value[name], list)):
        kinds = " and ".join(type(part).__name__ for part in (prompt, value[name]))
        what = f"columns 'prompt' and '{name}' must both be text or both be lists of messages, not {kinds}"
        raise RequestError(what, where=row.place)
    opening, turns = (_read_messages(value, column, row.place) for column in ("prompt", name))
    if opening[-1]["role"] == "assistant":
        raise RequestError("column 'prompt' must not end with a message of the assistant", where=row.place)
    if turns[0]["role"] != "assistant":
        raise RequestError(f"column '{name}' must begin with a message of the assistant", where=row.place)
    return Conversation(opening, turns, _read_variables(row))


def _extract_prompt(row: Row) -> Row:
    """Return the row with the prompt that its two answers begin with, as TRL extracts it."""
    chosen, rejected = row.value["chosen"], row.value["rejected"]
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        what = "columns 'chosen' and 'rejected' must both be text or both be lists of messages"
        raise RequestError(what, where=row.place)
    most = min(len(chosen), len(rejected)) - 1
    shared = next((n for n in range(most) if chosen[n] != rejected[n]), max(most, 0))
    if isinstance(chosen, str) and chosen[shared - 1 : shared] == " ":
        shared -= 1
    if not shared:
        what = "the row has no prompt, and 'chosen' and 'rejected' begin differently"
        raise RequestError(what, where=row.place, remedy="add the column 'prompt'")
    split = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    return Row(row.place, {**row.value, **split})


def _make_conversation(
    messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], place: str
) -> Example:
    first = next((n for n, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None:
        raise RequestError("there is no message of the assistant, so nothing to learn", where=place)
    copies = tuple(dict(message) for message in messages)
    return Conversation(copies[:first], copies[first:], variables)


def _read_messages(value: Mapping[str, Any], name: str, place: str) -> tuple[Message, ...]:
    """Return the messages of a column, with text as content and tool calls in one form."""
    messages = value[name]
    if isinstance(messages, str):  # as in a CSV file
        messages = _parse_json(messages)
    if not isinstance(messages, list) or not messages:
        remedy = 'write [{"role": "user", "content": "..."}, ...]; in a CSV file, the same as JSON text'
        raise RequestError(f"column '{name}' is not a list of messages", where=place, remedy=remedy)
    try:
        if isinstance(messages[0], dict) and "from" in messages[0]:
            return tuple(from_sharegpt(messages))
        return tuple(_read_message(message, f"{name}[{n}]") for n, message in enumerate(messages))
    except RequestError as error:
        raise RequestError(error.what, where=place, remedy=error.remedy) from None


def _read_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise RequestError(f"{where} is not a message with role and content")
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where} has the role {str(role)[:80]!r}", remedy=f"one of: {', '.join(ROLES)}")
    if "content" not in message and not message.get("tool_calls"):
        raise RequestError(f"{where} has no content")
    result = {**message, "role": ROLES[role], "content": read_content(message.get("content"), where)}
    if message.get("weight", 1) not in (0, 1):
        raise RequestError(f"{where} has a weight other than 0 and 1")
    if calls := result.pop("tool_calls", None):
        if not isinstance(calls, list) or role != "assistant":
            raise RequestError(f"{where} has tool_calls that are not a list of the assistant's")
        result["tool_calls"] = [_read_tool_call(call, where) for call in calls]
    return result


def _read_tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} has a tool call without a function's name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json(arguments)
    if not isinstance(arguments, dict):
        raise RequestError(f"{where} has tool-call arguments that are not a JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _read_variables(row: Row) -> dict[str, Any]:
    """Return the template's inputs from the columns `tools` and `chat_template_kwargs`."""
    variables = row.value.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict) or any(name in variables for name in RESERVED_VARIABLES):
        what = f"column 'chat_template_kwargs' is not an object without {', '.join(RESERVED_VARIABLES)}"
        raise RequestError(what, where=row.place)
    tools = row.value.get("tools", [])
    if isinstance(tools, str):
        tools = _parse_json(tools)
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise RequestError("column 'tools' is not a list of functions", where=row.place)
    return {**variables, "tools": tools} if tools else dict(variables)


def _parse_json(text: str) -> Any:
    """Return the value of JSON text; None if it is not JSON."""
    try:
        return parse_strict_json(text.encode())
    except ValueError:
        return None


def _read_text(value: Mapping[str, Any], name: str, place: str) -> str:
    if not isinstance(value[name], str) or not value[name]:
        raise RequestError(f"column '{name}' is not text, or empty", where=place)
    return str(value[name])


def _column_error(row: Row, task: str, expected: str, other: str) -> RequestError:
    columns = json.dumps(sorted(row.value), ensure_ascii=False)[1:-1][:200] or "none"
    remedy = f"task: {other} reads such rows" if other else "rename the columns; a null counts as missing"
    if "answer" in row.value and not other:
        remedy += ". As questions for task rl: environment: {id: jsonl, path: FILE}"
    what = f"task {task} needs the columns {expected}; this row has {columns}"
    return RequestError(what, where=row.place, remedy=remedy)
