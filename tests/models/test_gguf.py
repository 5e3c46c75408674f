"""GGUF import and export against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors.torch import load_file

from gguf_cases import TEXTS, transformers_tokenizer, transformers_weights, write_gguf
from perilune import load_model
from perilune.errors import RequestError
from perilune.models.checkpoints.loading import new_model, save_checkpoint
from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.decoder import Decoder
from perilune.models.gguf.architecture import ARCHITECTURES, layout
from perilune.models.gguf.convert import convert
from perilune.models.gguf.export import export_gguf
from perilune.models.gguf.header import read_header
from perilune.models.gguf.vocabulary import read_tokenizer
from perilune.models.text.tokenizer import Tokenizer

KINDS = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
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
def test_weights_of_every_type_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind=kind)
    convert(path, tmp_path / "out")
    assert_same_weights(tmp_path / "out", path)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_converted_weights_and_config_equal_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoConfig

    path = write_gguf(tmp_path / "model.gguf", architecture)
    convert(path, tmp_path / "out")
    assert_same_weights(tmp_path / "out", path)
    ours, theirs = AutoConfig.from_pretrained(tmp_path / "out"), transformers_weights(path)[1]
    for name in SAME:
        expected = getattr(theirs, name, None)
        if name == "head_dim" and expected is None:  # transformers computes it
            expected = theirs.hidden_size // theirs.num_attention_heads
        assert getattr(ours, name, None) == expected, name


def test_tokens_and_chat_template_equal_those_of_transformers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    convert(path, tmp_path / "out")
    ours, theirs = Tokenizer.load(tmp_path / "out"), transformers_tokenizer(path)
    for text in TEXTS:
        assert ours.encode_rendered([text])[0] == theirs.encode(text, add_special_tokens=False)
    rendered = theirs.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert ours.render_prompt(ASKED) == rendered
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 0)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_pre_tokenizers_agree_with_transformers(tmp_path: Path, pre: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", changes={"tokenizer.ggml.pre": pre})
    ours, theirs = read_tokenizer(read_header(path)), transformers_tokenizer(path)
    for text in TEXTS:
        assert ours.encode_rendered([text])[0] == theirs.encode(text, add_special_tokens=False)


def test_smollm_pre_tokenizer_splits_digits(tmp_path: Path) -> None:
    """llama.cpp and the model's own tokenizer follow the rule "smollm"; transformers ignores it."""
    plain = read_tokenizer(read_header(write_gguf(tmp_path / "a.gguf")))
    smollm = write_gguf(tmp_path / "b.gguf", changes={"tokenizer.ggml.pre": "smollm"})
    alone = read_tokenizer(read_header(smollm))
    for text, merged, single in (("12", ["12"], ["1", "2"]), ("\n\n1", ["\n", "\n", "1"], ["\n\n", "1"])):
        assert [plain.token_text(token) for token in plain.encode(text)] == merged
        assert [alone.token_text(token) for token in alone.encode(text)] == single
    assert transformers_tokenizer(smollm).encode("12") == plain.encode("12")


def test_load_model_converts_a_gguf_file_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "olmo2"])
def test_tensor_names_equal_those_of_the_gguf_package(architecture: str) -> None:
    kind = ARCHITECTURES[architecture]
    options: dict[str, Any] = {"attention_bias": True} if architecture == "llama" else {}
    config = DecoderConfig(kind.model_type, 300, 512, 256, 2, 4, 2, 128, tie_word_embeddings=False, **options)
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], 2)
    assert {name: target.name for name, target in layout(config, kind).items()} == {
        names.get_name(target.name, (".weight", ".bias")): target.name
        for target in layout(config, kind).values()
    }
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Decoder(config).state_dict().items()}
    assert shapes == {target.name: target.shape for target in layout(config, kind).values()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "olmo2"])
def test_exported_model_round_trips(tmp_path: Path, architecture: str) -> None:
    convert(write_gguf(tmp_path / "model.gguf", architecture, "F16"), tmp_path / "out")
    export_gguf(tmp_path / "out", tmp_path / "again.gguf", "f32")
    convert(tmp_path / "again.gguf", tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].float(), second[name]) for name in first)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).read_text() == (tmp_path / "second" / file).read_text()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "second")]
    assert configs[0] | {"dtype": "float32"} == configs[1]


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_transformers_loads_exported_model(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama")
    convert(path, tmp_path / "out")
    export_gguf(tmp_path / "out", tmp_path / "again.gguf", kind)
    ours, theirs = (
        load_file(tmp_path / "out/model.safetensors"),
        transformers_weights(tmp_path / "again.gguf")[0],
    )
    for name, tensor in ours.items():
        if kind == "q8_0":  # error of at most half a step, where a step is the largest value / 127
            assert (tensor - theirs[name]).abs().max() <= tensor.abs().max() / 127 * 0.51, name
        else:
            assert torch.equal(
                tensor.half().float() if kind == "f16" and tensor.ndim > 1 else tensor, theirs[name]
            )
    assert transformers_tokenizer(tmp_path / "again.gguf").encode(TEXTS[0]) == transformers_tokenizer(
        path
    ).encode(TEXTS[0])


def test_export_rejects_tokenizer_without_byte_level_bpe(tmp_path: Path) -> None:
    tokenizer = Tokenizer.characters()
    save_checkpoint(tmp_path / "tiny", new_model("tiny", tokenizer, 0), tokenizer)
    with pytest.raises(RequestError, match="not a byte-level BPE") as caught:
        export_gguf(tmp_path / "tiny", tmp_path / "tiny.gguf", "f16")
    assert "Hugging Face folder" in caught.value.remedy  # llama.cpp cannot convert it either
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
