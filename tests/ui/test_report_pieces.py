"""Text pieces of tokens: joined they equal the answer, otherwise the result is None."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from perilune.models.text.tokenizer import Tokenizer
from perilune.ui.pieces import Vocabulary


def test_character_tokens_are_pieces_and_eos_is_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.characters()
    tokenizer.save(tmp_path)
    vocabulary = Vocabulary((tmp_path / "tokenizer.json").read_text())
    pieces = vocabulary.pieces(tokenizer.encode_completion("7+5\n=12"), "7+5\n=12")
    assert pieces is not None
    entries = [vocabulary.table[piece] for piece in pieces if isinstance(piece, int)]
    assert entries == [*((text, False) for text in "7+5\n=12"), ("<eos>", True)]


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    """A byte-level tokenizer: "é" and "月" take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_last_token_of_a_multibyte_character_carries_its_text(byte_level: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level))
    text = "aé月"
    ids = backend.encode(text).ids
    vocabulary = Vocabulary(byte_level.read_text())
    pieces = vocabulary.pieces(ids, text)
    assert pieces == ["a", "", "é", "", "", "月"]


def test_answer_cut_inside_a_character_keeps_its_tokens(byte_level: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(byte_level))
    ids = [*backend.encode("aé").ids, *backend.encode("月").ids[:2]]
    text = backend.decode(ids)
    assert Vocabulary(byte_level.read_text()).pieces(ids, text) == ["a", "", "é", "", text[2:]]


def test_pieces_are_none_when_tokens_do_not_spell_the_answer(byte_level: Path) -> None:
    ids = Tokenizer.characters().encode("347+268=")
    assert Vocabulary(byte_level.read_text()).pieces(ids, "347+268=") is None


def test_vocabulary_refuses_damaged_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"model": {"type": "WordLevel"')
    with pytest.raises(ValueError, match="not a tokenizer"):
        Vocabulary(file.read_text())
