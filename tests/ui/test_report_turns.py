"""Multi-turn episodes in the report: roles, texts and token ranges of turns."""

import numpy as np
import pytest

from perilune.data.episode import Episode
from perilune.models.text.tokenizer import Tokenizer
from perilune.ui.pieces import Vocabulary
from perilune.ui.turns import list_turns, split_pieces, split_turns

PLAIN = Tokenizer.characters()
SAID = [("user", "2*3="), ("assistant", "2*3"), ("tool", "=6\n"), ("tool", "!"), ("assistant", ";6")]


def episode(*, mask=None):
    parts = [PLAIN.encode_completion("2*3"), PLAIN.encode("=6\n!"), PLAIN.encode_completion(";6")]
    own = np.repeat([True, False, True], [len(part) for part in parts])
    ids = np.concatenate([np.array(part, np.int32) for part in parts])
    return Episode(
        episode_id="1/0/0", group_id="1/0", task_id="t", environment="calculator", seed=0,
        messages=tuple({"role": role, "content": text} for role, text in SAID),
        prompt_ids=np.array(PLAIN.encode("2*3="), np.int32), token_ids=ids,
        loss_mask=own if mask is None else mask, logprobs=np.zeros(len(ids), np.float32),
        policy_version=np.where(own, 4, -1).astype(np.int32), finish_reason="stop", reward=1.0,
    )  # fmt: skip


@pytest.fixture
def vocabulary(tmp_path):
    PLAIN.save(tmp_path)
    return Vocabulary((tmp_path / "tokenizer.json").read_text())


def test_turns_have_token_ranges(vocabulary):
    sample = episode()
    turns = list_turns(sample)
    assert [(turn["role"], turn["text"]) for turn in turns] == [
        ("assistant", "2*3"), ("tool", "=6\n!"), ("assistant", ";6"),
    ]  # fmt: skip
    assert [(turn["start"], turn["end"]) for turn in turns] == [(0, 4), (4, 8), (8, 11)]
    texts = [
        piece if isinstance(piece, str) else vocabulary.table[piece][0]
        for piece in split_pieces(vocabulary, sample)
    ]
    assert "".join(texts) == "2*3<eos>=6\n!;6<eos>"


def test_pieces_are_none_for_foreign_vocabulary(tmp_path):
    Tokenizer.characters("".join(reversed("=*;0123456789abc"))).save(tmp_path)
    assert split_pieces(Vocabulary((tmp_path / "tokenizer.json").read_text()), episode()) is None


def test_single_turn_gives_none_and_mismatched_mask_gives_no_ranges():
    assert list_turns(episode(mask=np.ones(11, np.bool_))) is None
    odd = list_turns(episode(mask=np.arange(11) != 0))
    assert [turn["role"] for turn in odd] == ["assistant", "tool", "assistant"] and "start" not in odd[0]


def test_consecutive_messages_of_other_roles_form_one_turn():
    messages = [{"role": role, "content": text} for role, text in [*SAID, ("user", "a"), ("tool", "b")]]
    assert split_turns(messages)[-1] == {"role": "user and tool", "text": "ab"}
