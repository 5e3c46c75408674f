"""Models in GGUF files, against the conversion of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_cases import TEXTS, transformers_tokenizer, transformers_weights, write_gguf
from safetensors.torch import load_file
from transformers import AutoConfig

from perilune import load_model
from perilune.models.gguf.convert import convert
from perilune.models.text.tokenizer import Tokenizer

KINDS = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)
SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "model_type", "rope_parameters", "attention_bias"),
)
ASKED = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERILUNE_HOME", str(tmp_path / "home"))


def assert_same_weights(folder: Path, path: Path) -> None:
    ours = load_file(folder / "model.safetensors")
    theirs, config = transformers_weights(path)
    if config.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.float(), theirs[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_type_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind=kind)
    convert(path, tmp_path / "out")
    assert_same_weights(tmp_path / "out", path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_architectures_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture)
    convert(path, tmp_path / "out")
    assert_same_weights(tmp_path / "out", path)
    ours, theirs = AutoConfig.from_pretrained(tmp_path / "out"), transformers_weights(path)[1]
    for name in SAME:
        expected = getattr(theirs, name, None)
        if name == "head_dim" and expected is None:  # transformers computes it
            expected = theirs.hidden_size // theirs.num_attention_heads
        assert getattr(ours, name, None) == expected, name


def test_tokens_and_template_are_those_of_transformers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    convert(path, tmp_path / "out")
    ours, theirs = Tokenizer.load(tmp_path / "out"), transformers_tokenizer(path)
    for text in TEXTS:
        assert ours.encode_rendered([text])[0] == theirs.encode(text, add_special_tokens=False)
    rendered = theirs.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert ours.render_prompt(ASKED) == rendered
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 0)


def test_a_gguf_file_is_loaded_as_it_is_and_converted_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind="Q8_0")
    first, tokenizer = load_model(path)
    assert "converting" in capfd.readouterr().err
    second, _ = load_model(path)
    assert "converting" not in capfd.readouterr().err
    expected, _ = transformers_weights(path)
    for name, tensor in second.state_dict().items():
        assert torch.equal(tensor, expected[name]) and torch.equal(tensor, first.state_dict()[name])
    assert tokenizer.encode("hello") == Tokenizer.load(
        next((tmp_path / "home/models").glob("gguf-*"))
    ).encode("hello")
