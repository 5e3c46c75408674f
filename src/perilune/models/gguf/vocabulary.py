"""Converts the tokenizer of a GGUF file for the `tokenizers` library, with special tokens and chat template.

A GGUF file has the vocabulary, the merges and the name of the rule that splits text before merging
(`tokenizer.ggml.pre`). The rules are those of llama.cpp, which took them from the models' own tokenizers.
transformers ignores rules that it does not know, such as "smollm", and then splits some texts differently.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from perilune.errors import RequestError
from perilune.files import read_json
from perilune.models.gguf.header import GgufHeader
from perilune.models.text.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # values of tokenizer.ggml.token_type
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """The rule that splits text before merging.

    Attributes:
        pattern: a regular expression; "" for that of GPT-2.
        digits: whether each digit is a piece of its own.
        whole_words: whether a piece that is in the vocabulary becomes one token without applying merges.
        add_bos: whether a text begins with BOS if the metadata does not specify it.
    """

    pattern: str = ""
    digits: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2 = Splitting()
_DIGITS = Splitting(digits=True)
_LLAMA_BPE = Splitting(_LLAMA3, whole_words=True, add_bos=True)

SPLITTINGS: Mapping[str, Splitting] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mpt", "jais", "default"), _GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA_BPE),
        **dict.fromkeys(("dbrx", "smaug-bpe"), Splitting(_LLAMA3)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Splitting(_QWEN2)),
        "tekken": Splitting(_TEKKEN, whole_words=True, add_bos=True),
    }
)
"""By `tokenizer.ggml.pre`."""


def read_tokenizer(header: GgufHeader) -> Tokenizer:
    """Read the tokenizer with its special tokens and chat template.

    Raises:
        RequestError: when the kind of tokenizer is not supported, or its metadata is incomplete or malformed.
    """
    kind = header.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise header.error(
            f"the tokenizer kind {kind[:40]!r} is not supported",
            "use a file with tokenizer kind gpt2 (byte-level BPE), or the safetensors checkpoint",
        )
    tokens = header.array("tokenizer.ggml.tokens", str)
    if len(set(tokens)) != len(tokens):
        raise header.error("the vocabulary has a token twice")
    splitting = _splitting(header)
    backend = _byte_level(header, tokens, splitting)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": header.flag("tokenizer.ggml.add_bos_token", splitting.add_bos),
        "model_max_length": header.integer(f"{header.text('general.architecture')}.context_length"),
    }
    for key, name in _SPECIAL.items():
        index = header.optional_integer(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index >= len(tokens):
            raise header.error(
                f"tokenizer.ggml.{key}_token_id is {index}, and there are {len(tokens)} tokens"
            )
        if index is not None:
            config[name] = tokens[index]
    if "eos_token" not in config:
        raise header.error("the metadata has no tokenizer.ggml.eos_token_id")
    template = header.text("tokenizer.chat_template", "")
    return Tokenizer(backend, config, chat_template=template or None, where=str(header.path))


def _splitting(header: GgufHeader) -> Splitting:
    name = header.text("tokenizer.ggml.pre", "gpt-2")
    if name not in SPLITTINGS:
        raise header.error(
            f"tokenizer.ggml.pre is {name[:40]!r}, a rule for splitting text that is not supported",
            f"use a model with one of {', '.join(SPLITTINGS)}",
        )
    return SPLITTINGS[name]


def _byte_level(header: GgufHeader, tokens: list[str], splitting: Splitting) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in header.array("tokenizer.ggml.merges", str)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words)
    except Exception as error:  # the library raises plain exceptions
        raise header.error(f"the tokenizer is malformed: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer(splitting)
    backend.decoder = decoders.ByteLevel()
    kinds = (
        header.array("tokenizer.ggml.token_type", int)
        if "tokenizer.ggml.token_type" in header.metadata
        else []
    )
    kind_by_token = list(zip(tokens, kinds, strict=False))
    backend.add_special_tokens([_added(token, True) for token, kind in kind_by_token if kind == _CONTROL])
    backend.add_tokens([_added(token, False) for token, kind in kind_by_token if kind == _USER_DEFINED])
    return backend


def pre_tokenizer(splitting: Splitting) -> Any:
    """Return the byte-level pre-tokenizer of the `tokenizers` library with this rule."""
    split = [Regex(splitting.pattern)] if splitting.pattern else []
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    steps += [pre_tokenizers.Split(pattern, behavior="isolated") for pattern in split]
    steps += [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, normalized=False, special=special)


def vocabulary_metadata(folder: Path, size: int) -> dict[str, Any]:
    """Return the metadata of the tokenizer in a Hugging Face folder: the reverse of `read_tokenizer`.

    Args:
        size: number of tokens of the model; ids without a token get a placeholder.

    Raises:
        RequestError: when the tokenizer is not a byte-level BPE, or its rule for splitting text has no name
            in GGUF.
    """
    tokenizer = Tokenizer.load(folder)
    raw = read_json(folder / "tokenizer.json")
    model, steps = raw["model"], _steps(raw.get("pre_tokenizer"))
    byte_level = (raw.get("decoder") or {}).get("type") == "ByteLevel"
    if model.get("type") != "BPE" or not byte_level or raw.get("normalizer") not in (None, {"type": "NFC"}):
        error = _not_in_gguf(folder, "the tokenizer is not a byte-level BPE")
        if model.get("type") == "WordLevel":  # a token per character; llama.cpp has no such tokenizer
            error.remedy = "export a Hugging Face folder: perilune model export CHECKPOINT FOLDER"
        raise error
    splittings = {name: json.loads(pre_tokenizer(rule).__getstate__()) for name, rule in SPLITTINGS.items()}
    name = next((name for name, described in splittings.items() if _steps(described) == steps), None)
    if name is None:
        raise _not_in_gguf(folder, "the tokenizer splits text by a rule that has no name in GGUF")
    tokens = [f"[PAD{index}]" for index in range(size)]
    kinds = [_UNUSED] * size
    for token, index in model["vocab"].items():
        tokens[index], kinds[index] = token, _NORMAL
    for added in raw["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": bool(tokenizer.encode_text_prompt("")),
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
    }
    optional = {"bos_token_id": tokenizer.bos_token_id, "padding_token_id": tokenizer.pad_token_id}
    metadata |= {f"tokenizer.ggml.{key}": index for key, index in optional.items() if index is not None}
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template.source
    return metadata


def _steps(described: Mapping[str, Any] | None) -> list[tuple[Any, ...]]:
    """Return the type and the relevant options of each step of a pre-tokenizer in tokenizer.json."""
    steps = (described or {}).get("pretokenizers", [described] if described else [])
    return [
        (step["type"], step.get("pattern"), step.get("use_regex"), step.get("individual_digits"))
        for step in steps
    ]


def _not_in_gguf(folder: Path, why: str) -> RequestError:
    return RequestError(why, where=str(folder), remedy="use convert_hf_to_gguf.py of llama.cpp")
