"""Trains a talker and a code predictor by SFT on (text, codes), and writes a folder that the server loads.

The loss is the talker's cross-entropy of each frame's first code and of the end, and the code predictor's
cross-entropy of the other codes, both under teacher forcing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.bundle.workspace import Workspace
from perilune.models.attention import PackedAttention
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.rope import Rope
from perilune.models.text.tokenizer import Tokenizer
from perilune.rollout.timing import Stopwatch
from perilune.speech.codec_encoder import encode
from perilune.speech.config import CodecConfig, ControlTokens, SpeechConfig
from perilune.speech.folder import SpeechModel, save_speech_model
from perilune.speech.prompt import Utterance, embed_utterance
from perilune.speech.sampling import SpeechSampling
from perilune.speech.talker import Talker
from perilune.tasks.speech.codec import Codec, load_codec
from perilune.tasks.speech.fitting import Fit
from perilune.tasks.speech.stages import VoiceSpec
from perilune.tasks.speech.utterances import SpokenText, read_utterances
from perilune.tasks.stage.policy import prepare_device
from perilune.tasks.stage.training import StepReport, TrainingLoop, write_final_checkpoint

_HEAD_DIM = 32
_MARKS = 7  # number of special codec tokens, after the codes
_TEXT_MARKS = 5  # number of special text tokens, after the tokenizer's
_VOCABULARY = 512  # largest vocabulary; a word that occurs twice is a token
_POSITIONS = 1024
_LONGEST = 20.0  # most seconds of an utterance, if the voice never draws the end token
_ROLE = "assistant\n"  # beginning of every prompt


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A text and the codes int64[T, Q] of the teacher's speech, once for each shift."""

    text: str
    codes: Sequence[Tensor]


def run(workspace: Workspace, spec: VoiceSpec) -> dict[str, Any]:
    """Train the voice, write it, and return the stage's summary."""
    prepare_device(workspace)
    codec, seed = load_codec(workspace.input("codec")), workspace.job.seed
    utterances = read_utterances(workspace.input("data"), "train")
    examples = encode_examples(codec, utterances, spec.shifts)
    tokenizer = Tokenizer.trained([_ROLE, _ROLE, *(example.text for example in examples)], _VOCABULARY)
    talker = Talker(voice_config(spec, codec.decoder.config, tokenizer))
    talker.initialize(seed)
    fit = Fit(talker, spec.learning, spec.steps, seed)
    loop = TrainingLoop(workspace, fit, spec)

    def step(done: int, watch: Stopwatch) -> StepReport:
        with watch.measure("learning"):
            batch = _draw(examples, spec.learning.batch, fit.generator(done))
            first, rest = voice_losses(talker, tokenizer, batch)
            norm = fit.update(first + rest, done)
        figures = {"first_code_loss": float(first.detach()), "other_codes_loss": float(rest.detach())}
        frames = sum(len(codes) for _, codes in batch)
        return StepReport({**figures, "frames": frames, "grad_norm": norm}, figures)

    loop.run(step)
    sampling = SpeechSampling(
        temperature=spec.temperature,
        repetition_penalty=1.0,
        rest_temperature=spec.temperature,
        max_frames=int(_LONGEST / codec.decoder.config.frame_seconds),
    )
    model = SpeechModel(talker, codec.decoder, tokenizer, sampling)
    encoder = codec.encoder.state_dict()
    write_final_checkpoint(
        workspace, fit, spec.steps, lambda folder: save_speech_model(folder, model, encoder)
    )
    last = workspace.metrics()[-1]
    return {
        "kind": "voice",
        "steps": spec.steps,
        "parameters": sum(parameter.numel() for parameter in talker.parameters()),
        "predictor_parameters": sum(parameter.numel() for parameter in talker.predictor.parameters()),
        "text_tokens": tokenizer.vocab_size,
        **{name: last[name] for name in ("first_code_loss", "other_codes_loss")},
    }


def encode_examples(codec: Codec, utterances: Sequence[SpokenText], shifts: int) -> list[Example]:
    """Return the codes of each utterance after silences of 0, 1/n, ... (n-1)/n of a frame, n = `shifts`.

    Without the silences, the first word would always begin at the start of a frame.
    """
    frame = codec.decoder.config.frame
    return [
        Example(
            utterance.text,
            [
                encode(
                    codec.encoder,
                    codec.decoder,
                    F.pad(torch.from_numpy(utterance.samples), (shift * frame // shifts, 0)),
                )
                for shift in range(shifts)
            ],
        )
        for utterance in utterances
    ]


def voice_config(spec: VoiceSpec, codec: CodecConfig, tokenizer: Tokenizer) -> SpeechConfig:
    """Return the shape of the voice, in the family of Qwen3-TTS."""
    codes, words = codec.codebook_size, tokenizer.vocab_size
    return SpeechConfig(
        talker=_decoder(spec.width, spec.layers, codes + _MARKS),
        predictor=_decoder(spec.predictor_width, spec.predictor_layers, codes),
        codec=codec,
        text_vocab_size=words + _TEXT_MARKS,
        text_hidden_size=spec.width,
        marks=ControlTokens.after(codes, words),
    )


def _decoder(width: int, layers: int, vocabulary: int) -> DecoderConfig:
    heads = width // _HEAD_DIM
    return DecoderConfig(
        architecture="qwen3",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=_HEAD_DIM,
        rope=Rope(1000.0),
        tie_word_embeddings=False,
        max_position_embeddings=_POSITIONS,
        initializer_range=0.05,
    )


def _draw(examples: Sequence[Example], count: int, random: torch.Generator) -> list[tuple[str, Tensor]]:
    """Return random texts, each with the codes of a random shift."""
    chosen = torch.randint(len(examples), (count,), generator=random).tolist()
    shifts = torch.randint(len(examples[0].codes), (count,), generator=random).tolist()
    return [(examples[i].text, examples[i].codes[shift]) for i, shift in zip(chosen, shifts, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """The embeddings of all tokens, projected once for all prompts of a batch."""

    config: SpeechConfig
    device: torch.device
    text: Tensor
    codec: Tensor

    @classmethod
    def of(cls, talker: Talker) -> _Tables:
        texts = torch.arange(talker.config.text_vocab_size)
        codecs = torch.arange(talker.config.talker.vocab_size)
        return cls(talker.config, talker.device, talker.embed_text(texts), talker.embed_codec(codecs))

    def embed_text(self, token_ids: Tensor) -> Tensor:
        return self.text[token_ids]

    def embed_codec(self, token_ids: Tensor) -> Tensor:
        return self.codec[token_ids]


def voice_losses(
    talker: Talker, tokenizer: Tokenizer, batch: Sequence[tuple[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropies in nats of the first codes (and ends), and of the other codes."""
    eos = torch.tensor([talker.config.marks.eos])
    inputs, targets, drawn_from, lengths = [], [], [], []
    offset, tables = 0, _Tables.of(talker)
    for text, codes in batch:
        prompt = embed_utterance(tables, tokenizer, Utterance(text))
        inputs += [prompt.inputs, talker.embed_frames(codes) + prompt.pad]
        targets.append(torch.cat([codes[:, 0], eos]))
        last = offset + len(prompt.inputs) - 1
        drawn_from.append(torch.arange(last, last + len(codes) + 1))
        lengths.append(len(prompt.inputs) + len(codes))
        offset += lengths[-1]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in lengths])
    hidden = talker(torch.cat(inputs), positions, PackedAttention(bounds))
    first = F.cross_entropy(talker.logits(hidden[torch.cat(drawn_from)]), torch.cat(targets))
    codes = torch.cat([codes for _, codes in batch])
    before = hidden[torch.cat([rows[:-1] for rows in drawn_from])]
    rest = talker.predictor(before, talker.embed_codec(codes[:, 0]), codes)
    return first, F.cross_entropy(rest.flatten(0, 1), codes[:, 1:].flatten())
