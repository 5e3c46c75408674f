"""The talker's input for a text: embeddings to prefill, and embeddings to add to later frames.

The input follows Qwen3-TTS: the role, then the language and the speaker, then the text. From the language on,
every position is the sum of a text embedding and a codec embedding. A pad token stands in for a missing one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from perilune.errors import RequestError
from perilune.models.text.tokenizer import Tokenizer
from perilune.speech.config import SpeechConfig

_ROLE = "assistant\n"
AUTO_LANGUAGE = "auto"


@dataclass(frozen=True, slots=True)
class Utterance:
    """A text to speak, and how to speak it.

    Attributes:
        text: the whole text. Splitting it would break its prosody.
        speaker: name of a speaker of the model, or None for its default voice.
        language: name of a language of the model, or "auto".
        instructions: how to speak, for models that take instructions.
        streamed_text: feed one text token per frame instead of the whole text before the first frame.
    """

    text: str
    speaker: str | None = None
    language: str = AUTO_LANGUAGE
    instructions: str = ""
    streamed_text: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TalkerPrompt:
    """The talker's input for an utterance.

    Attributes:
        inputs: float[P, d], the positions before the first frame.
        trailing: float[L, d]; row t is added to the embedding of frame t.
        pad: float[d], added to the embeddings of frames from L on.
    """

    inputs: Tensor
    trailing: Tensor
    pad: Tensor

    def text_of(self, frame: int) -> Tensor:
        """float[d], the text embedding that is added to the embedding of `frame`."""
        return self.trailing[frame] if frame < len(self.trailing) else self.pad


class Embedder(Protocol):
    """The talker, or precomputed tables of its embeddings."""

    @property
    def config(self) -> SpeechConfig: ...

    @property
    def device(self) -> torch.device: ...

    def embed_text(self, token_ids: Tensor) -> Tensor: ...

    def embed_codec(self, token_ids: Tensor) -> Tensor: ...


def embed_utterance(talker: Embedder, tokenizer: Tokenizer, utterance: Utterance) -> TalkerPrompt:
    """Embed `utterance`.

    Raises:
        RequestError: when the text is empty or too long, or the vocabulary cannot express it, or the model
            has no such speaker or language.
    """
    config, marks = talker.config, talker.config.marks
    role_length = len(tokenizer.encode(_ROLE))
    ids = tokenizer.encode(_ROLE + utterance.text)
    role, text = [marks.text_start, *ids[:role_length]], ids[role_length:]
    if not text:
        raise RequestError("the text is empty", where="input")
    style = _instruction_tokens(tokenizer, config, utterance.instructions) if utterance.instructions else []
    if len(text) + len(style) > config.talker.max_position_embeddings:  # before they are embedded
        message = f"text and instructions have {len(text) + len(style):,} tokens"
        raise RequestError(message, where="input", remedy="shorten them")
    codec = [*_voice_tokens(config, utterance), marks.pad]
    pads = [marks.text_pad] * (len(codec) - 1)
    before = [_embed_texts(talker, role), _embed_sum(talker, [*pads, marks.text_bos], codec)]
    if style:
        before.insert(0, _embed_texts(talker, style))
    pad = _embed_texts(talker, [marks.text_pad])
    if utterance.streamed_text:
        start = _embed_sum(talker, text[:1], [marks.bos])
        trailing = _embed_texts(talker, [*text[1:], marks.text_eos])
    else:
        embedded = _embed_sum(talker, [*text, marks.text_eos], [marks.pad] * (len(text) + 1))
        start = torch.cat([embedded, _embed_sum(talker, [marks.text_pad], [marks.bos])])
        trailing = pad
    return TalkerPrompt(torch.cat([*before, start]), trailing, pad[0])


def _voice_tokens(config: SpeechConfig, utterance: Utterance) -> list[int]:
    """Return the codec tokens of the language and the speaker."""
    marks = config.marks
    speaker = None if utterance.speaker is None else utterance.speaker.lower()
    language = utterance.language.lower()
    if speaker is not None and speaker not in config.speakers:
        raise _unknown_error("voice", utterance.speaker, config.speakers)
    if language in (AUTO_LANGUAGE, "chinese") and speaker is not None:
        language = config.dialects.get(speaker, language)
    if language == AUTO_LANGUAGE:
        spoken = [marks.nothink, marks.think_bos, marks.think_eos]
    elif language in config.languages:
        spoken = [marks.think, marks.think_bos, config.languages[language], marks.think_eos]
    else:
        raise _unknown_error("language", utterance.language, [AUTO_LANGUAGE, *config.languages])
    return spoken if speaker is None else [*spoken, config.speakers[speaker]]


def _unknown_error(kind: str, name: str | None, known: Iterable[str]) -> RequestError:
    names = ", ".join(sorted(known)) or "none"
    return RequestError(f"the model has no {kind} {name!r}", where=kind, remedy=f"it has: {names}")


def _instruction_tokens(tokenizer: Tokenizer, config: SpeechConfig, instructions: str) -> list[int]:
    ids = tokenizer.encode(f"user\n{instructions}")
    return [config.marks.text_start, *ids, config.marks.text_end, *tokenizer.encode("\n")]


def _embed_texts(talker: Embedder, token_ids: list[int]) -> Tensor:
    return talker.embed_text(_to_tensor(talker, token_ids))


def _embed_sum(talker: Embedder, text_ids: list[int], codec_ids: list[int]) -> Tensor:
    return _embed_texts(talker, text_ids) + talker.embed_codec(_to_tensor(talker, codec_ids))


def _to_tensor(talker: Embedder, token_ids: list[int]) -> Tensor:
    return torch.tensor(token_ids, device=talker.device)
