"""Keeps control tokens that a message spells out plain text when a chat template renders the message.

A template writes control tokens as text (`<|im_start|>`), and a message may contain the same text. Rendering
would make them indistinguishable. So before rendering, each control token in a message is replaced by a rare
ideograph that no message contains. After rendering, the ideographs mark where to encode plain text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tokenizers

from perilune.errors import RequestError

# Characters that every Jinja filter leaves unchanged: no case, no space, printable.
_IDEOGRAPHS = range(0x20000, 0x2A6E0)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The output of a chat template.

    Attributes:
        text: the output, with an ideograph for each control token that a message spelled out.
        spelled: the control token of each ideograph.
    """

    text: str
    spelled: Mapping[str, str] = field(default_factory=dict)

    def with_text(self, text: str) -> Rendered:
        """Return a copy with `text`, which is a part of this text."""
        return replace(self, text=text)

    def pieces(self) -> list[str]:
        """Split the text: template output at even indices, spelled-out control tokens at odd ones."""
        if not self.spelled:
            return [self.text]
        parts = re.split(f"([{''.join(self.spelled)}])", self.text)
        return [self.spelled[part] if index % 2 else part for index, part in enumerate(parts)]


class SpelledTokens:
    """A search for the control tokens of one tokenizer in messages."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        names = []
        for token in backend.get_added_tokens_decoder().values():
            if token.special and token.content:
                # A normalized token also matches normalized text, which may be lower case.
                name = re.escape(token.content)
                names.append(f"(?i:{name})" if token.normalized else name)
        # Longer names first, because a name may be a prefix of another.
        self._pattern = re.compile("|".join(sorted(names, key=len, reverse=True)) or r"(?!)")

    def hide(self, inputs: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """Replace control tokens in template inputs; also return the control token of each ideograph.

        Raises:
            RequestError: when there are more different control tokens than ideographs, or the inputs nest too
                deeply.
        """
        spelled: list[str] = []
        characters: set[str] = set()

        def collect(text: str) -> str:
            spelled.extend(self._pattern.findall(text))
            characters.update(text)
            return text

        try:
            _map_texts(inputs, collect)
        except RecursionError:
            raise RequestError("the messages nest too deeply") from None
        if not spelled:
            return inputs, {}
        free = (chr(code) for code in _IDEOGRAPHS if chr(code) not in characters)
        names = dict.fromkeys(spelled)
        stand_ins = dict(zip(names, free, strict=False))
        if len(stand_ins) < len(names):
            raise RequestError(f"the messages spell out {len(names):,} different control tokens")
        hidden = _map_texts(inputs, lambda text: self._pattern.sub(lambda m: stand_ins[m[0]], text))
        return hidden, {character: name for name, character in stand_ins.items()}


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to every text in `value`, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(name, change): _map_texts(item, change) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_map_texts(item, change) for item in value]
    return value
