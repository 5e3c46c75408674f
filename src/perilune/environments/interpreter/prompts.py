"""The texts that an agent with an interpreter sees."""

from typing import Literal

from perilune.environments.builtin import tool_calls
from perilune.environments.core.long_context import Glimpse
from perilune.environments.interpreter.interpreter import BlockResult

Style = Literal["natural", "compact"]
Tool = Literal["python", "ask"]

_SAMPLE_CHARS = 200
_LENGTH_DIGITS = 7  # of a compact length, so that a longer context shifts nothing in the prompt
_OPENING = """\
{what} of {characters} characters in {lines} lines, too long to show. It begins:
{sample}

{question}

{how}"""
_PYTHON = """\
To explore C, write one fenced block of Python and nothing after it; you are told what it prints. Variables
keep their values from block to block.{functions}
When you know the answer, run a block that sets answer["content"] = ... and answer["ready"] = True, or write
<answer>...</answer>."""
_ASK = """\
A language model that sees nothing else can answer a question about some lines, counted from 1:
<tool_call>{"name": "ask", "arguments": {"question": "...", "first": 1, "last": 8}}</tool_call>
When you know the answer, write <answer>...</answer>."""
_FUNCTIONS = """
ask(question) gives a question to a language model, which sees nothing else, and returns its answer as a str.
ask_all(questions) gives it a list of questions at the same time, which is much faster than one by one.
A question that is too long gets the answer ''.{contexts}"""
_CONTEXTS = """
ask(question, context) and ask_all(questions, contexts) give each model a C of its own to explore."""


def render_opening(style: Style, tool: Tool, context: Glimpse, question: str, depth: int) -> str:
    """Render the first message: size and first lines of the context, the question, and the tools.

    Args:
        depth: how deep sub-agents may be nested below this agent.
    """
    first = [line[:_SAMPLE_CHARS] for line in context.first]
    if style == "compact":
        return "\n".join([f"{context.lines:0{_LENGTH_DIGITS}}", *first, question, ""])
    functions = _FUNCTIONS.format(contexts=_CONTEXTS if depth > 1 else "") if depth else ""
    return _OPENING.format(
        what="There is a text" if tool == "ask" else "The Python variable C is a str",
        characters=context.characters(),
        lines=context.lines,
        sample="\n".join(first),
        question=question,
        how=_ASK if tool == "ask" else _PYTHON.format(functions=functions),
    )


def render_output(style: Style, block: BlockResult, max_chars: int) -> str:
    """Render the output of a block that did not end the episode."""
    ended = f"[ended: {block.cause}; its variables are lost]\n" if block.cause else ""
    return tool_calls.render_output(block.output[:max_chars] + ended, compact=style == "compact")
