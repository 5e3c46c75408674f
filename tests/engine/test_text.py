"""Streaming detokenization: whole characters, and no part of a stop text, at any token boundary."""

import copy
import time
from itertools import chain

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from perilune.engine.text import TextStream
from perilune.models.text.tokenizer import Tokenizer


def bytes_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte and a few letter pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["ab", "ba", "aa", "bb"]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *pairs, "<eos>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in pairs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, {"eos_token": "<eos>", "clean_up_tokenization_spaces": False})


TOKENIZER = bytes_tokenizer()
texts = st.text(alphabet="ab é漢🙂", max_size=24)


def stream(tokens: list[int], stops: list[str]) -> tuple[TextStream, list[str]]:
    text_stream = TextStream(TOKENIZER, stops)
    pieces = []
    for token in tokens:
        text_stream.push(token)
        if text_stream.stopped:
            break
        pieces.append(text_stream.take_text(last=False))
    text_stream.finish()
    return text_stream, [*pieces, text_stream.take_text(last=True)]


def fallback_tokenizer(*steps: decoders.Decoder) -> Tokenizer:
    """A sentencepiece-style tokenizer with byte fallback."""
    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "é", "漢"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([*steps, decoders.ByteFallback(), decoders.Fuse(), *STRIP])
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend, {"eos_token": "<eos>"})


def word_tokenizer() -> Tokenizer:
    pieces = ["[UNK]", "<eos>", "a", "##b", "##é", ".", "b", ","]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend, {"eos_token": "<eos>"})


STRIP = [decoders.Strip(" ", 1, 0)]
TOKENIZERS = {
    "byte-level": TOKENIZER,
    "byte fallback": fallback_tokenizer(decoders.Replace("▁", " ")),
    "word pieces": word_tokenizer(),
    "characters": Tokenizer.characters(),
}
# Whole characters, truncated characters, and bytes that are invalid in UTF-8.
WHOLE = [character.encode() for character in "é漢🙂"]
PIECES = [*WHOLE, *(data[:-1] for data in WHOLE), b"\x80", b"\xe0\x80", b"\xed\xa0", b"\xff"]


def tokens_of(kind: str) -> st.SearchStrategy[list[int]]:
    """Random tokens, mixed with the bytes of whole and truncated characters."""
    tokenizer = TOKENIZERS[kind]
    anything = st.integers(0, tokenizer.vocab_size + 2)
    if kind not in {"byte-level", "byte fallback"}:
        return st.lists(anything, max_size=20)
    table = {data: index for index, data in enumerate(tokenizer.token_bytes()) if data and len(data) == 1}
    piece = st.sampled_from(PIECES).map(lambda data: [table[bytes([byte])] for byte in data])
    parts = st.lists(piece | anything.map(lambda token: [token]), max_size=16)
    return parts.map(lambda some: list(chain.from_iterable(some)))


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None, max_examples=200)
@given(st.data())
def test_streamed_pieces_of_any_tokens_equal_decoded_text(kind: str, data: st.DataObject) -> None:
    tokenizer, tokens = TOKENIZERS[kind], data.draw(tokens_of(kind))
    text_stream = TextStream(tokenizer, [])
    whole, emitted = tokenizer.decode(tokens), ""
    for token in tokens:
        text_stream.push(token)
        emitted += text_stream.take_text(last=False)
        assert whole.startswith(emitted)
    text_stream.finish()
    assert emitted + text_stream.take_text(last=True) == text_stream.text == whole


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_continuing_tokenizer_keeps_the_first_space(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind].continuing()
    if kind != "byte fallback":
        assert tokenizer is TOKENIZERS[kind]
        return
    text = data.draw(st.text(alphabet=" aé漢b\n", max_size=8))
    tokens = TOKENIZERS[kind].encode(text.replace(" ", "▁"))
    assert tokenizer.decode(tokens) == text
    text_stream = TextStream(tokenizer, [])
    for token in tokens:
        text_stream.push(token)
    text_stream.finish()
    assert text_stream.text == text


def test_text_of_a_word_initial_token_starts_with_a_space() -> None:
    metaspace = copy.deepcopy(fallback_tokenizer(decoders.Replace("▁", " "))._backend)
    metaspace.decoder = decoders.Metaspace()
    for tokenizer in (TOKENIZERS["byte fallback"], Tokenizer(metaspace, {"eos_token": "<eos>"})):
        token = tokenizer._backend.token_to_id("▁a")
        assert (tokenizer.decode([token, token]), tokenizer.token_text(token)) == ("a a", " a")
        assert tokenizer.continuing().decode([token, token]) == " a a"


def test_stream_emits_characters_once_their_bytes_are_complete() -> None:
    text_stream = TextStream(TOKENIZER, [])
    for character in "é漢🙂\ufffd":
        for token in TOKENIZER.encode(character):
            text_stream.push(token)
        assert text_stream.take_text(last=False) == character


@settings(deadline=None)
@given(texts, st.lists(st.text(alphabet="ab é漢", min_size=1, max_size=4), max_size=3))
def test_streamed_pieces_equal_text_before_the_first_stop(text: str, stops: list[str]) -> None:
    text_stream, pieces = stream(TOKENIZER.encode(text), stops)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if ends:
        # A token may have several characters; the search covers all of them at once.
        assert text_stream.stopped
        assert any(text.startswith("".join(pieces) + stop) for stop in stops)
        assert not any(stop in "".join(pieces) for stop in stops)
    else:
        assert not text_stream.stopped
        assert "".join(pieces) == text
    assert "".join(pieces) == text_stream.text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_holds_back_possible_stop_prefixes() -> None:
    text_stream = TextStream(TOKENIZER, ["abb b"])
    pieces = []
    for token in TOKENIZER.encode("b abb abb b a"):
        text_stream.push(token)
        pieces.append(text_stream.take_text(last=False))
        if text_stream.stopped:
            break
    assert text_stream.stopped
    assert "".join(pieces) == text_stream.text == "b abb "
    assert not "".join(pieces[:4]).endswith("ab")


def test_finish_emits_incomplete_bytes_as_replacement_characters() -> None:
    tokens = TOKENIZER.encode("a🙂")[:3]
    text_stream, pieces = stream(tokens, [])
    assert "".join(pieces) == text_stream.text == "a\ufffd"
    assert stream(TOKENIZER.encode("🙂")[:1] * 9, [])[0].text.count("\ufffd") == 9


def test_stop_texts_are_ignored_while_may_stop_is_false() -> None:
    text_stream = TextStream(TOKENIZER, ["b"])
    for token in TOKENIZER.encode("a b"):
        text_stream.push(token, may_stop=False)
    assert not text_stream.stopped
    text_stream.push(TOKENIZER.encode(" ")[0])
    assert not text_stream.stopped
    text_stream.push(TOKENIZER.encode("b")[0])
    assert (text_stream.stopped, text_stream.text) == (True, "a b ")


@pytest.mark.parametrize("stops", [[], ["zzz"]])
def test_stream_holds_back_no_text_without_a_possible_stop(stops: list[str]) -> None:
    text_stream = TextStream(TOKENIZER, stops)
    for token in TOKENIZER.encode("a b"):
        text_stream.push(token)
        assert text_stream.take_text(last=False)


def test_long_stop_texts_are_fast() -> None:
    text = TextStream(TOKENIZER, ["b" * 9000] * 16)
    text.text = "a" * 8000
    began = time.process_time()
    for _ in range(20):
        assert text.take_text(last=False) in (text.text, "")
    assert time.process_time() - began < 0.2
