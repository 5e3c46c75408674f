"""Tokens as text: joined, they are the answer, or there are none."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from perilune.models.text.tokenizer import Tokenizer
from perilune.ui.pieces import Vocabulary


def test_characters_are_pieces_and_the_end_is_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.characters()
    tokenizer.save(tmp_path)
    vocabulary = Vocabulary((tmp_path / "tokenizer.json").read_text())
    pieces = vocabulary.pieces(tokenizer.encode_completion("7+5\n=12"), "7+5\n=12")
    assert pieces is not None
    shown = [vocabulary.table[piece] for piece in pieces if isinstance(piece, int)]
    assert shown == [*((text, False) for text in "7+5\n=12"), ("<eos>", True)]


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are single bytes, so that "é" and "月" take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_the_token_that_completes_a_character_brings_its_text(byte_level: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level))
    text = "aé月"
    ids = backend.encode(text).ids
    vocabulary = Vocabulary(byte_level.read_text())
    pieces = vocabulary.pieces(ids, text)
    assert pieces == ["a", "", "é", "", "", "月"]


def test_an_answer_that_ends_within_a_character_keeps_its_tokens(byte_level: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level))
    ids = [*backend.encode("aé").ids, *backend.encode("月").ids[:2]]
    text = backend.decode(ids)
    assert Vocabulary(byte_level.read_text()).pieces(ids, text) == ["a", "", "é", "", text[2:]]


def test_a_tokenizer_that_does_not_spell_the_answer_is_not_believed(byte_level: Path) -> None:
    ids = Tokenizer.characters().encode("347+268=")
    assert Vocabulary(byte_level.read_text()).pieces(ids, "347+268=") is None


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": {"type": "WordLevel"')
    with pytest.raises(ValueError, match="not a tokenizer"):
        Vocabulary(file.read_text())
