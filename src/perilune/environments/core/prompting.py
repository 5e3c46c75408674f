"""The `prompting` section that every environment accepts: the prompt of a pretrained model."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from perilune.environments.core.answer_format import FormatName
from perilune.environments.core.protocol import Message
from perilune.frozen import Frozen

PROMPTING_KEY = "prompting"  # in the environment section of a recipe


class Example(Frozen):
    """A worked example, shown before each task."""

    question: str = Field(min_length=1, description="what the user asks")
    answer: str = Field(min_length=1, description="what the assistant writes, in the format if there is one")


class PromptingSettings(Frozen):
    """The prompt of a pretrained model, and how its answer is extracted."""

    system: str = Field("", description="system prompt; empty: none, unless the chat template adds its own")
    few_shot: int | tuple[Example, ...] = Field(
        0,
        union_mode="left_to_right",
        description="examples before each task: a list of sections with `question` and `answer`; or a"
        " number of training tasks, which are shown with their right answers and not trained"
        " on",
    )
    format: FormatName | None = Field(
        None,
        description="how the prompt tells the model to mark its answer; only the marked answer is scored;"
        " null: the environment scores the whole text",
    )
    instruction: str | None = Field(
        None, description="sentence that asks for the format; null: the format's own; empty: do not ask"
    )
    instruct: Literal["prompt", "system"] = Field(
        "prompt", description="where the instruction is appended: to each question, or to the system prompt"
    )
    system_as: Literal["system", "user"] = Field(
        "system",
        description="user: put the system prompt before the first question, for templates that reject system"
        " messages",
    )
    stop: tuple[str, ...] = Field(
        (), description="texts that end an answer, such as `</answer>`; they remain part of it"
    )


class PromptBuilder:
    """Builds a whole prompt around a task's own messages.

    Args:
        instruction: the sentence that asks for the format; empty for none.
    """

    def __init__(self, settings: PromptingSettings, instruction: str) -> None:
        self._settings, self._instruction = settings, instruction

    def build_question(self, own: Sequence[Message]) -> list[Message]:
        """Return a task's messages without their system prompt; the instruction follows the last question."""
        messages = list(own[_has_system(own) :])
        if self._instruction and self._puts_instruction_in_question(own):
            index = max(n for n, message in enumerate(messages) if message["role"] == "user")
            messages[index] = _join_parts(messages[index], messages[index]["content"], self._instruction)
        return messages

    def build_prompt(self, own: Sequence[Message], examples: Sequence[Message]) -> tuple[Message, ...]:
        """Return the system prompt, the examples and the question."""
        messages = [*examples, *self.build_question(own)]
        system = [self._settings.system, own[0]["content"] if _has_system(own) else ""]
        if not self._puts_instruction_in_question(own):
            system.append(self._instruction)
        if not any(system):
            return tuple(messages)
        if self._settings.system_as == "system":
            return (_join_parts({"role": "system"}, *system), *messages)
        if not messages or messages[0]["role"] != "user":
            return (_join_parts({"role": "user"}, *system), *messages)
        return (_join_parts(messages[0], *system, messages[0]["content"]), *messages[1:])

    def _puts_instruction_in_question(self, own: Sequence[Message]) -> bool:
        return self._settings.instruct == "prompt" and any(message["role"] == "user" for message in own)


def _has_system(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0]["role"] == "system"


def _join_parts(message: Message, *parts: str) -> Message:
    """Return the message with the parts that are not empty as paragraphs."""
    return {**message, "content": "\n\n".join(part for part in parts if part)}
