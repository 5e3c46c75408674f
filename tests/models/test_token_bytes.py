"""The bytes of each token, for every supported kind of vocabulary."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from perilune.errors import RequestError
from perilune.models.text.token_bytes import token_bytes
from perilune.models.text.tokenizer import PRINTABLE_ASCII, Tokenizer

TEXTS = ['{"name": "Zoë", "n": 42}', "a b  c\n\tdéjà vu — 日本語", "<think>yes</think>"] * 4


def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE like Qwen's, with control tokens and added text tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """A sentencepiece-style BPE like Llama 2's: spaces are "▁"; missing characters fall back to bytes."""
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    backend.train_from_iterator(TEXTS[:1], trainers.BpeTrainer(vocab_size=330, special_tokens=specials))
    # The trainer makes all specials control tokens; published files have only three.
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


BACKENDS = {"byte level": byte_level(), "sentencepiece": sentencepiece()}


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30).filter(lambda text: "<" not in text))
def test_bytes_of_tokens_spell_the_text(kind: str, text: str) -> None:
    table = token_bytes(BACKENDS[kind])
    ids = BACKENDS[kind].encode(text, add_special_tokens=False).ids
    spelled = b"".join(table[token] or b"?" for token in ids).decode()
    assert spelled == (f" {text}" if kind == "sentencepiece" and text else text)


@pytest.mark.parametrize("kind", BACKENDS)
def test_token_bytes_agree_with_llguidance(kind: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    theirs = llguidance.LLTokenizer(BACKENDS[kind].to_str(), eos_token=2)
    for token, text in enumerate(token_bytes(BACKENDS[kind])):
        # llguidance marks control tokens with the byte 0xff, and takes <think> for a control token.
        if text in (b"\xff", b"<think>"):
            continue
        assert theirs.is_special_token(token) == (text is None), token
        if text is not None:
            assert theirs.decode_bytes([token]) == text, token


def test_control_tokens_have_no_bytes_and_added_text_tokens_do() -> None:
    backend = BACKENDS["byte level"]
    table = token_bytes(backend)
    assert table[backend.token_to_id("<|end|>")] is None
    assert table[backend.token_to_id("<think>")] == b"<think>"
    assert [table[i] for i in range(3)] != [None] * 3
    assert token_bytes(BACKENDS["sentencepiece"])[:4] == [None, None, None, b"\0"]


def test_character_tokens_are_their_own_bytes() -> None:
    table = Tokenizer.characters().token_bytes()
    assert table == [None, None, *(character.encode() for character in PRINTABLE_ASCII)]


def test_unused_token_ids_have_no_bytes() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "c": 4}))
    backend.decoder = decoders.Fuse()
    assert token_bytes(backend) == [b"a", None, None, None, b"c"]


@pytest.mark.parametrize(
    ("decoder", "found"),
    [(decoders.WordPiece(), "WordPiece"), (decoders.BPEDecoder(), "BPEDecoder"), (None, "no decoder")],
)
def test_context_dependent_decoders_are_rejected(decoder: decoders.Decoder | None, found: str) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(RequestError, match=f"{found}.*depends on its neighbors"):
        token_bytes(backend)
