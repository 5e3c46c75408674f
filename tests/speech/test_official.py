"""The speech modules against the official package, qwen-tts 0.1.1 (see make_official.py), in float32."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from official_weights import drawn
from safetensors.torch import load_file, save_file
from tokenizers import Regex, models, pre_tokenizers

from perilune.models.attention import PackedAttention
from perilune.models.text.tokenizer import Tokenizer
from perilune.speech import folder as speech_folder
from perilune.speech.codec import CodecDecoder
from perilune.speech.config import CodecConfig, SpeechConfig
from perilune.speech.folder import SpeechModel, load_speech_model
from perilune.speech.prompt import Utterance, embed_utterance
from perilune.speech.sampling import SpeechSampling
from perilune.speech.synthesis import Speaker
from perilune.speech.talker import Talker

OFFICIAL = Path(__file__).parent / "official"
CASES = {
    "whole": Utterance("abcdef", "ryan", "English"),
    "streamed": Utterance("abcdef", streamed_text=True),
    "dialect": Utterance("abcdef", "Eric"),
}


def word_tokenizer() -> Tokenizer:
    """The ids of make_official.TEXT."""
    words = {"<eos>": 0, "assistant": 5, "\n": 6} | {letter: 20 + i for i, letter in enumerate("abcdef")}
    backend = tokenizers.Tokenizer(models.WordLevel(words))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("assistant|[a-z\n]"), behavior="isolated")
    return Tokenizer(backend, {"eos_token": "<eos>"})


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(OFFICIAL / "expected.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeechModel:
    """A model loaded from a folder with the official package's configurations and weights."""
    path = tmp_path_factory.mktemp("official") / "model"
    shutil.copytree(OFFICIAL, path)
    codec = CodecConfig.from_hf(speech_folder.read_json(path / "speech_tokenizer" / "config.json"))
    config = SpeechConfig.from_hf(speech_folder.read_json(path / "config.json"), codec)
    with torch.device("meta"):
        modules = {"": Talker(config), "decoder.": CodecDecoder(codec)}
    for prefix, module in modules.items():
        tensors = {}
        for name, tensor in module.state_dict().items():
            there = prefix + name if prefix else speech_folder.stored_name(name)
            if there is not None:
                tensors[there] = torch.from_numpy(drawn(there, tuple(tensor.shape)))
        save_file(tensors, (path / "speech_tokenizer" if prefix else path) / "model.safetensors")
    word_tokenizer().save(path)
    (path / "expected.safetensors").unlink()
    return load_speech_model(path)


def assert_close(ours: torch.Tensor | np.ndarray, theirs: torch.Tensor, most: float = 2e-6) -> None:
    ours = torch.as_tensor(ours)
    assert ours.shape == theirs.shape
    assert theirs.abs().max() > 0.1
    assert (ours - theirs).abs().max() <= most * theirs.abs().max()


@torch.no_grad()
def test_codec_samples_match_the_official_package(
    model: SpeechModel, expected: dict[str, torch.Tensor]
) -> None:
    assert_close(model.codec(expected["codes"]), expected["samples"], 2e-5)


@torch.no_grad()
def test_logits_match_the_official_package(model: SpeechModel, expected: dict[str, torch.Tensor]) -> None:
    talker, frames = model.talker, expected["frames"]
    first = talker.embed_codec(frames[:, 0])
    assert_close(talker.predictor(expected["hidden"], first, frames), expected["predictor_logits"])
    length = len(expected["inputs"])
    hidden = talker(expected["inputs"], torch.arange(length), PackedAttention(torch.tensor([0, length])))
    assert_close(talker.logits(hidden)[-2:], expected["talker_logits"])


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_prompt_embeddings_match_the_official_package(
    model: SpeechModel, expected: dict[str, torch.Tensor], case: str
) -> None:
    prompt = embed_utterance(model.talker, model.tokenizer, CASES[case])
    assert_close(prompt.inputs, expected[f"{case}.inputs"])
    assert_close(prompt.trailing, expected[f"{case}.trailing"])


@torch.no_grad()
def test_pipeline_samples_the_codes_of_the_official_package(
    model: SpeechModel, expected: dict[str, torch.Tensor]
) -> None:
    greedy = SpeechSampling(temperature=0, rest_temperature=0, max_frames=12)
    audio = Speaker(SpeechModel(model.talker, model.codec, model.tokenizer, greedy)).say(list(CASES.values()))
    for case, samples in zip(CASES, audio, strict=True):
        assert_close(samples[None], model.codec(expected[f"{case}.codes"][None]), 1e-5)
