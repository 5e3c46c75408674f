"""The configuration of a speech model, read from and written to the config.json of Qwen3-TTS folders.

A folder has two configurations: its own config.json describes the talker and the code predictor, and
speech_tokenizer/config.json the codec. Both are untrusted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, get_args

from perilune.errors import RequestError
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.reader import Reader

MODEL_TYPE = "qwen3_tts"
Vocoder = Literal["convolutions", "spectrum"]
_MROPE = ("mrope_section", "interleaved", "mrope_interleaved", "rope_type", "type")


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """Shape of the codec decoder, which turns frames of Q codes into samples.

    Attributes:
        codebooks: Q, codes per frame. The first codebook has its own projection.
        codebook_size: entries of each codebook.
        codebook_dim: size of the summed codebook embeddings. A codebook entry has half this size.
        latent_dim: channels between codebooks, transformer and vocoder.
        window: frames that a query of the transformer sees, its own included.
        upsampling_ratios: factors before the vocoder.
        upsample_rates: factors of the vocoder's blocks. Each block halves the channels.
        vocoder_dim: channels at the beginning of the vocoder.
        vocoder: "convolutions", as in Qwen3-TTS, or "spectrum", whose hop is the only rate.
    """

    codebooks: int = 16
    codebook_size: int = 2048
    codebook_dim: int = 512
    latent_dim: int = 1024
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_layers: int = 8
    num_heads: int = 16
    num_kv_heads: int = 16
    head_dim: int = 64
    window: int = 72
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    upsampling_ratios: tuple[int, ...] = (2, 2)
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    vocoder_dim: int = 1536
    vocoder: Vocoder = "convolutions"
    sample_rate: int = 24000

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            values = getattr(self, setting.name)
            for value in values if isinstance(values, tuple) else (values,):
                if not isinstance(value, bool | str) and not value > 0:
                    raise _config_error(f"{setting.name} is {value!r}, not positive")
        if self.codebooks < 2:
            raise _config_error("a codec needs at least two codebooks")
        if self.codebook_dim % 2 or self.head_dim % 2:
            raise _config_error("codebook_dim and head_dim must be even")
        if self.num_heads % self.num_kv_heads:
            message = f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            raise _config_error(message)
        if self.vocoder not in get_args(Vocoder):
            raise _config_error(f"there is no vocoder {self.vocoder!r}")
        if self.vocoder == "spectrum" and len(self.upsample_rates) != 1:
            raise _config_error("a spectral vocoder has one upsampling rate, its hop")
        if self.vocoder_dim % 2 ** len(self.upsample_rates):
            raise _config_error(f"decoder_dim {self.vocoder_dim} cannot be halved in each of its blocks")

    @property
    def frame(self) -> int:
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)

    @property
    def frame_seconds(self) -> float:
        return self.frame / self.sample_rate

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, where: str = "config.json") -> CodecConfig:
        """Read the content of speech_tokenizer/config.json.

        Raises:
            RequestError: on a value that the codec decoder does not implement.
        """
        outer = Reader(raw, where)
        outer.reject("model_type", "qwen3_tts_tokenizer_12hz", "only the 12 Hz tokenizer is implemented")
        read, default = outer.inner("decoder_config"), cls()
        read.reject("hidden_act", "silu", "only silu is implemented")
        read.reject("rope_scaling", None, "only unscaled rotary embeddings are implemented")
        numbers: dict[str, Any] = {
            name: read.count(key, getattr(default, name)) for name, key in _CODEC_KEYS.items()
        }
        factors: dict[str, Any] = {
            name: read.integers(name) or getattr(default, name) for name in _CODEC_FACTORS
        }
        codec = cls(
            **numbers,
            **factors,
            head_dim=read.count("head_dim", numbers["hidden_size"] // numbers["num_heads"]),
            rope_theta=read.number("rope_theta", default.rope_theta),
            rms_norm_eps=read.number("rms_norm_eps", default.rms_norm_eps),
            attention_bias=read.boolean("attention_bias", False),
            vocoder=read.raw.get("vocoder", default.vocoder),
            sample_rate=outer.count("output_sample_rate", default.sample_rate),
        )
        if outer.count("decode_upsample_rate", codec.frame) != codec.frame:
            raise outer.wrong("decode_upsample_rate", f"the factors of decoder_config make {codec.frame}")
        return codec

    def to_hf(self) -> dict[str, Any]:
        decoder = {key: getattr(self, name) for name, key in _CODEC_KEYS.items()}
        decoder |= {
            **{name: list(getattr(self, name)) for name in _CODEC_FACTORS},
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "attention_bias": self.attention_bias,
            "hidden_act": "silu",
        }
        if self.vocoder != "convolutions":  # a key that Qwen3-TTS does not have
            decoder["vocoder"] = self.vocoder
        return {
            "model_type": "qwen3_tts_tokenizer_12hz",
            "decoder_config": decoder,
            "encoder_valid_num_quantizers": self.codebooks,
            "input_sample_rate": self.sample_rate,
            "output_sample_rate": self.sample_rate,
            "encode_downsample_rate": self.frame,
            "decode_upsample_rate": self.frame,
        }


_CODEC_FACTORS = ("upsampling_ratios", "upsample_rates")
_CODEC_KEYS: Mapping[str, str] = {
    "codebooks": "num_quantizers",
    "codebook_size": "codebook_size",
    "codebook_dim": "codebook_dim",
    "latent_dim": "latent_dim",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "window": "sliding_window",
    "vocoder_dim": "decoder_dim",
}


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """Token ids that structure the talker's input. `text_*` are text tokens. The others are codec tokens.

    Attributes:
        eos: ends the speech. The talker draws no other of these tokens.
        think, nothink, think_bos, think_eos: surround the language.
        pad, bos: the codec token at text positions, and at the position before the first frame.
        text_start: begins the role, as <|im_start|> does.
        text_end: ends an instruction, as <|im_end|> does.
        text_pad, text_bos, text_eos: the text token at codec positions, before the text, and after it.
    """

    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int
    pad: int
    bos: int
    text_start: int
    text_end: int
    text_pad: int
    text_bos: int
    text_eos: int

    @classmethod
    def after(cls, codes: int, text_tokens: int) -> ControlTokens:
        """Return tokens for a new model: codec tokens after its codes, text tokens after its text tokens."""
        text = len(_TEXT_CONTROL_KEYS)
        return cls(*range(codes, codes + len(_CODEC_CONTROL_KEYS)), *range(text_tokens, text_tokens + text))


_CODEC_CONTROL_KEYS = {
    "eos": "codec_eos_token_id",
    "think": "codec_think_id",
    "nothink": "codec_nothink_id",
    "think_bos": "codec_think_bos_id",
    "think_eos": "codec_think_eos_id",
    "pad": "codec_pad_id",
    "bos": "codec_bos_id",
}
_TEXT_CONTROL_KEYS = {
    "text_start": "im_start_token_id",
    "text_end": "im_end_token_id",
    "text_pad": "tts_pad_token_id",
    "text_bos": "tts_bos_token_id",
    "text_eos": "tts_eos_token_id",
}


@dataclass(frozen=True, slots=True)
class SpeechConfig:
    """Shape of a speech model.

    Attributes:
        talker: the decoder that predicts the first code of each frame; its vocabulary has the codes, then
            languages, speakers and marks.
        predictor: the decoder that predicts the other codes of a frame; its vocabulary is a codebook.
        text_vocab_size, text_hidden_size: size of the text embeddings before their projection.
        marks: special tokens.
        languages, speakers: codec tokens by lower-case name.
        dialects: for some speakers, the language that they speak.
        kind: `tts_model_type`: "custom_voice", "voice_design" or "base".
    """

    talker: DecoderConfig
    predictor: DecoderConfig
    codec: CodecConfig
    text_vocab_size: int
    text_hidden_size: int
    marks: ControlTokens
    languages: Mapping[str, int] = field(default_factory=dict)
    speakers: Mapping[str, int] = field(default_factory=dict)
    dialects: Mapping[str, str] = field(default_factory=dict)
    kind: str = "custom_voice"

    def __post_init__(self) -> None:
        codec_ids = [getattr(self.marks, name) for name in _CODEC_CONTROL_KEYS]
        codec_ids += [*self.languages.values(), *self.speakers.values()]
        text_ids = [getattr(self.marks, name) for name in _TEXT_CONTROL_KEYS]
        for ids, size in ((codec_ids, self.talker.vocab_size), (text_ids, self.text_vocab_size)):
            if not all(0 <= token < size for token in ids):
                raise _config_error(f"a special token is outside the vocabulary of {size}")
        codes = self.codec.codebook_size
        if self.talker.vocab_size <= codes or self.predictor.vocab_size < codes:
            raise _config_error(f"the vocabularies do not hold the {codes} codes of a codebook")
        if min(codec_ids) < codes:
            raise _config_error(f"a special token of the codec is one of the {codes} codes")
        for dialect in self.dialects.values():
            if dialect not in self.languages:
                raise _config_error(f"the dialect {dialect!r} is not a language")

    @property
    def code_groups(self) -> int:
        """Q, codes of a frame."""
        return self.codec.codebooks

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], codec: CodecConfig, *, where: str = "config.json"
    ) -> SpeechConfig:
        """Read the content of a Qwen3-TTS config.json.

        Raises:
            RequestError: on a value that is malformed or not implemented.
        """
        outer = Reader(raw, where)
        outer.reject("model_type", MODEL_TYPE, "give a Qwen3-TTS folder")
        read = outer.inner("talker_config")
        predictor = read.inner("code_predictor_config")
        for section in (read, predictor):
            if section.count("num_code_groups", codec.codebooks) != codec.codebooks:
                raise section.wrong("num_code_groups", f"the codec has {codec.codebooks} codebooks")
        marks = {name: read.integer(key) for name, key in _CODEC_CONTROL_KEYS.items()}
        marks |= {name: outer.integer(key) for name, key in _TEXT_CONTROL_KEYS.items()}
        speakers = _read_names(read, "spk_id")
        dialects = _read_dialects(read, speakers)
        kind = outer.raw.get("tts_model_type")
        return cls(
            talker=_read_decoder(read),
            predictor=_read_decoder(predictor, head_dim=128),
            codec=codec,
            text_vocab_size=read.count("text_vocab_size"),
            text_hidden_size=read.count("text_hidden_size", 2048),
            marks=ControlTokens(**marks),
            languages=_read_names(read, "codec_language_id"),
            speakers=speakers,
            dialects=dialects,
            kind=kind if isinstance(kind, str) else "custom_voice",
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the content of config.json."""
        marks = {key: getattr(self.marks, name) for name, key in _CODEC_CONTROL_KEYS.items()}
        sections = self.talker.head_dim // 2
        rope = {"rope_type": "default", "type": "default", "interleaved": True}
        predictor = self.predictor.to_hf() | {
            "model_type": "qwen3_tts_talker_code_predictor",
            "num_code_groups": self.code_groups,
            "rope_scaling": None,
        }
        talker = self.talker.to_hf() | {
            "model_type": "qwen3_tts_talker",
            "num_code_groups": self.code_groups,
            "text_vocab_size": self.text_vocab_size,
            "text_hidden_size": self.text_hidden_size,
            "rope_scaling": rope | {"mrope_section": [sections - 2 * (sections // 3), *[sections // 3] * 2]},
            "spk_id": dict(self.speakers),
            "spk_is_dialect": {name: self.dialects.get(name, False) for name in self.speakers},
            "codec_language_id": dict(self.languages),
            "code_predictor_config": predictor,
            **marks,
        }
        for section in (talker, predictor):
            section.pop("rope_parameters", None)
            section.pop("architectures", None)
        return {
            "architectures": ["Qwen3TTSForConditionalGeneration"],
            "model_type": MODEL_TYPE,
            "tokenizer_type": "qwen3_tts_tokenizer_12hz",
            "tts_model_type": self.kind,
            "talker_config": talker,
            **{key: getattr(self.marks, name) for name, key in _TEXT_CONTROL_KEYS.items()},
        }


def _read_decoder(read: Reader, head_dim: int | None = None) -> DecoderConfig:
    """Read the decoder. Its three rotary axes have equal positions in speech, so they act as one axis."""
    if read.raw.get("rope_scaling") is not None:
        inner = read.inner("rope_scaling")
        kinds = {inner.raw.get("rope_type", "default"), inner.raw.get("type", "default")}
        if kinds != {"default"} or not set(inner.raw) <= set(_MROPE):
            raise read.unsupported("rope_scaling", "only multimodal sections are implemented")
    heads = read.count("num_attention_heads", 16)
    size = read.count("head_dim", head_dim or read.count("hidden_size", 1024) // heads)
    flat = {**_QWEN3, **read.raw, "rope_scaling": None, "rope_parameters": None, "head_dim": size}
    return DecoderConfig.from_hf(flat | {"model_type": "qwen3"}, where=read.where)


# Values of missing keys in the configuration classes of qwen-tts.
_QWEN3 = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_size": 1024}


def _read_names(read: Reader, key: str) -> dict[str, int]:
    if read.raw.get(key) is None:
        return {}
    inner = read.inner(key)
    return {str(name).lower(): inner.integer(name) for name in inner.raw}


def _read_dialects(read: Reader, speakers: Mapping[str, int]) -> dict[str, str]:
    if read.raw.get("spk_is_dialect") is None:
        return {}
    inner = read.inner("spk_is_dialect").raw
    return {
        str(name).lower(): value
        for name, value in inner.items()
        if isinstance(value, str) and str(name).lower() in speakers
    }


def _config_error(message: str) -> RequestError:
    return RequestError(message, where="speech model configuration")
