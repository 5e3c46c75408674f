"""The model that the server serves."""

from dataclasses import dataclass, field
from pathlib import Path

from perilune.models.text.tokenizer import Tokenizer
from perilune.serve.parts import THINK_END, THINK_START
from perilune.serve.tool_formats import FORMATS, ToolFormat


def visible_marks(tool_format: ToolFormat, *, reasoning: bool) -> tuple[str, ...]:
    """Return the control tokens that must appear in the decoded text of an answer."""
    return (*tool_format.marks, *((THINK_START, THINK_END) if reasoning else ()))


@dataclass(frozen=True)
class ServedModel:
    """The model that the server serves.

    Attributes:
        name: name of the model in requests.
        context: maximum number of tokens of prompt and answer together; the model's positions and the size of
            the cache limit it.
        end_tokens: tokens that end an answer.
        adapters: folders of the loaded LoRA adapters by name; they change while the server runs. A request
            selects an adapter with `model`.
        reasoning: whether to return the text in <think> ... </think> separately, as `reasoning_content`.
        tool_format: how the model writes tool calls.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    context: int
    end_tokens: tuple[int, ...]
    adapters: dict[str, Path] = field(default_factory=dict)
    reasoning: bool = False
    tool_format: ToolFormat = FORMATS["hermes"]

    @property
    def marks(self) -> tuple[str, ...]:
        """See `visible_marks`."""
        return visible_marks(self.tool_format, reasoning=self.reasoning)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a request may give as `model`."""
        return self.name, *self.adapters
